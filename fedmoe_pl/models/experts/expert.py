"""The base of the networks here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from fedmoe_pl.models.layers import keep_arguments


class Expert(nn.Module):
    """A network of an ``extractor`` and a ``classifier``; the arguments are the locals of a subclass's constructor."""

    extractor: nn.Module
    classifier: nn.Module

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        keep_arguments(self, arguments)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes), or (B, num_classes, ...) of dense outputs."""
        return self.classifier(self.extractor(x))
