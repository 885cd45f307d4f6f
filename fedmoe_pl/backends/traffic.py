"""Counts what clients and server send each other."""

from __future__ import annotations

from typing import NamedTuple

from fedmoe_pl.trees import Tree


class Traffic(NamedTuple):
    """How much was sent.

    Attributes:
        parameters: number of values.
        bytes: their size, in the data type in which they were sent.

    Example:
        >>> import torch
        >>> Traffic.of({"w": torch.zeros(2, 3)}) + Traffic.of({"b": torch.zeros(1, dtype=torch.float64)})
        Traffic(parameters=7, bytes=32)
    """

    parameters: int = 0
    bytes: int = 0

    @classmethod
    def of(cls, tree: Tree) -> Traffic:
        """The traffic of sending a tree once."""
        return cls(sum(tensor.numel() for tensor in tree.values()), sum(tensor.nbytes for tensor in tree.values()))

    def __add__(self, other: object) -> Traffic:
        """The sum of both."""
        if not isinstance(other, Traffic):
            return NotImplemented
        return Traffic(self.parameters + other.parameters, self.bytes + other.bytes)
