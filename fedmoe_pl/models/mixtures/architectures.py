"""Clients' local experts of different architectures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


class Absent(nn.Module):
    """Stands in for a local expert that a client does not have."""

    def __init__(self) -> None:  # without arguments, so that a checkpoint can rebuild it
        super().__init__()


class Architectures(nn.ModuleList):
    """The local experts of all architectures, by index; a client's module has only one of them.

    It computes that one, and a module with all of them the first one. Tensors are named ``<index>.<name>``, so that
    those of different shapes have different names.

    Args:
        experts: one module per architecture.
    """

    def __init__(self, experts: Iterable[nn.Module] = ()) -> None:
        super().__init__(experts)

    @property
    def present(self) -> dict[int, nn.Module]:
        """The experts of this module by index: all of them in the initial model, one in a client's module."""
        return {index: part for index, part in enumerate(self) if not isinstance(part, Absent)}

    @property
    def expert(self) -> nn.Module:
        """The first expert that is present: in a client's module, the client's own."""
        return next(iter(self.present.values()))

    @property
    def extractor(self) -> nn.Module:
        """The extractor of ``expert``."""
        return self.expert.extractor  # pyright: ignore[reportReturnType]

    @property
    def classifier(self) -> nn.Module:
        """The classifier of ``expert``."""
        return self.expert.classifier  # pyright: ignore[reportReturnType]

    def keep(self, index: int) -> None:
        """Removes all experts except this one, which keeps its name."""
        for other in range(len(self)):
            if other != index:
                self[other] = Absent()

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """The output of ``expert``."""
        return self.expert(*inputs, **options)
