"""Counts what clients and server send each other."""

from __future__ import annotations

from typing import NamedTuple

from fedmoe_pl.trees import Tree, of_module


class Traffic(NamedTuple):
    """How much was sent.

    Attributes:
        parameters: number of values of the model's tensors.
        bytes: the size of all that was sent, in the data type in which it was sent; also an algorithm's own tensors,
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
        """The sum of both."""
        if not isinstance(other, Traffic):
            return NotImplemented
        return Traffic(self.parameters + other.parameters, self.bytes + other.bytes)
