"""What single clients send, where the server needs the tensors of each: stacked, with the clients' ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedmoe_pl.trees import Tree, of_algorithm, problem_of_shapes, with_prefix

IDS = "uploads/ids"
"""Name of the clients' ids, shape (clients,)."""
TENSORS = "uploads/tensors/"
"""Prefix of the name of a tensor that clients send, stacked in the order of the ids."""


def upload(client_id: int, tensors: Mapping[str, Tensor]) -> Tree:
    """Copies of a client's tensors on the CPU, each with a first dimension of 1, and its id."""
    copies = {name: tensor.detach().cpu()[None].clone() for name, tensor in tensors.items()}
    return with_prefix(copies, TENSORS) | {IDS: torch.tensor([client_id])}


def problem_of_upload(
    sent: Tree, client_id: int, tensors: Mapping[str, Tensor], others: Mapping[str, Sequence[int | None]]
) -> str:
    """Why a client cannot have made an upload of tensors like these, sent beside ``others``; empty if it can."""
    shapes = {f"{TENSORS}{name}": (1, *tensor.shape) for name, tensor in tensors.items()} | {IDS: (1,)}
    if problem := problem_of_shapes(sent, {**shapes, **others}):
        return problem
    return "" if sent[IDS].item() == client_id else "has the tensors of another client"


def joined(a: Tree, b: Tree) -> Tree:
    """The uploads of two groups of clients, one of which may have none."""
    groups = of_algorithm(a), of_algorithm(b)
    return {name: torch.cat([each[name] for each in groups if name in each]) for name in {**groups[0], **groups[1]}}
