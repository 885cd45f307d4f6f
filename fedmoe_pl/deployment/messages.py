"""What server and clients of a deployed federation send each other, as bytes."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedmoe_pl.trees import Tree

FAILED, UNPREPARED, NOT_BEGUN, LEAVES = "failed", "unprepared", "not begun", "leaves"
"""Kinds of answers: the client has failed; it needs ``prepare`` first; it needs ``begin`` first; it is none of the
federation's clients, and ends."""
NOTE = "note"
"""Kind of a message whose ``text`` the client shows whoever runs it."""


class BadMessageError(Exception):
    """Bytes that are no message."""


@dataclass(frozen=True)
class Message:
    """A message, or the answer to one.

    Attributes:
        kind: what is asked for, or what the answer is.
        values: plain values: numbers, texts, and lists and dicts of them.
        tensors: tensors by name.
    """

    kind: str
    values: dict[str, Any] = field(default_factory=dict)
    tensors: Tree = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """The message as bytes, every tensor with its data type and bits."""
        # clones, because a view would be written with the whole tensor that it belongs to
        tensors = {name: tensor.detach().cpu().clone() for name, tensor in self.tensors.items()}
        buffer = io.BytesIO()
        torch.save({"kind": self.kind, "values": self.values, "tensors": tensors}, buffer)
        return buffer.getvalue()

    @classmethod
    def from_bytes(cls, content: bytes) -> Message:
        """Reads a message; no code in it is executed.

        Raises:
            BadMessageError: if the bytes are no message.
        """
        try:
            read = torch.load(io.BytesIO(content), weights_only=True, map_location="cpu")
            tensors = {name: tensor.detach() for name, tensor in read["tensors"].items()}
            message = cls(read["kind"], read["values"], tensors)
        except Exception as error:  # of other bytes, torch.load may raise anything
            raise BadMessageError("the bytes are no message") from error
        is_dict = isinstance(message.values, dict)
        has_names = is_dict and all(isinstance(name, str) for name in (*message.values, *message.tensors))
        of_tensors = all(_is_plain(tensor) for tensor in message.tensors.values())
        if not (isinstance(message.kind, str) and has_names and of_tensors):
            raise BadMessageError("the bytes are no message")
        return message


def _is_plain(tensor: Any) -> bool:
    """Whether it is a tensor with its values in memory, neither sparse nor without data."""
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided and tensor.device.type == "cpu"
