"""Counts and describes what clients and server send each other."""

from __future__ import annotations

from typing import Literal, NamedTuple

from fedmoe_pl.trees import Tree, of_module

Direction = Literal["down", "requests", "up", "between_clients"]
"""In this order: from the server to a client; from a client to the server, to ask for tensors; from a client to the
server, after its training; to a client from other clients."""
WEIGHT = "(weight)"
"""Name of the number by which the server weights a client's update; it is sent with the update."""


class Traffic(NamedTuple):
    """How much was sent.

    Attributes:
        parameters: number of values in the model's tensors.
        bytes: size of everything sent, in the data types in which it was sent; includes an algorithm's own tensors,
            such as control variates, indices and counts.

    Example:
        >>> import torch
        >>> Traffic.of({"w": torch.zeros(2, 3)}) + Traffic.of({"count/w": torch.zeros(1, dtype=torch.float64)})
        Traffic(parameters=6, bytes=32)
    """

    parameters: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, tree: Tree) -> Traffic:
        """The traffic of sending a tree once."""
        parameters = sum(tensor.numel() for tensor in of_module(tree).values())
        return cls(parameters, sum(tensor.nbytes for tensor in tree.values()))

    def __add__(self, other: object) -> Traffic:
        if not isinstance(other, Traffic):
            return NotImplemented
        return Traffic(self.parameters + other.parameters, self.bytes + other.bytes)


class Transfer(NamedTuple):
    """One tensor, sent once.

    Attributes:
        direction: who sent it to whom.
        client: the client that sent it to the server, or that received it.
        tensor: its name; if another client sent it, prefixed with the sender's id and a dot.
        shape: its shape.
        dtype: its data type, such as ``float32``; ``masked int64`` if the receiver learns only a sum over clients.
        bytes: its size; 0 for a client's weight, which is not a tensor.
    """

    direction: Direction
    client: int
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int


def transfers(direction: Direction, client: int, tree: Tree) -> list[Transfer]:
    """The tensors of a tree, sent once."""
    return [
        Transfer(direction, client, name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), tensor.nbytes)
        for name, tensor in tree.items()
    ]


class TransferLog:
    """Collects the tensors that are sent in a round, if a callback needs them."""

    def __init__(self, active: bool) -> None:
        self.active = active
        self.transfers: list[Transfer] = []

    def add(self, direction: Direction, client: int, tree: Tree) -> None:
        """Adds the tensors of a tree that was sent once."""
        if self.active:
            self.transfers += transfers(direction, client, tree)


def updates_sent(client: int, tree: Tree, masked: bool) -> list[Transfer]:
    """What a client sends after its training: its update's tensors and its weight; nothing if there are no tensors."""
    sent = transfers("up", client, tree)
    if masked:
        sent = [each._replace(dtype=f"masked {each.dtype}") for each in sent]
    return [*sent, Transfer("up", client, WEIGHT, (), "float", 0)] if tree else []
