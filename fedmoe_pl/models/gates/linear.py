"""The gates of PFL-MoE: one linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedmoe_pl.checks import check_sizes
from fedmoe_pl.models.gates.gate import Gate


class _SigmoidGate(Gate):
    """A linear layer and a sigmoid; if the layer's width is None, the first input sets it."""

    def __init__(self, in_features: int | None) -> None:
        super().__init__()
        check_sizes(self, in_features=in_features)
        self.linear = nn.LazyLinear(1) if in_features is None else nn.Linear(in_features, 1)

    @property
    def in_features(self) -> int | None:
        """Number of values that the gate reads per sample; None until a lazy gate has read its first input."""
        return self.linear.in_features or None

    def forward(self, x: Tensor) -> Tensor:
        """Weights (B, 2) = (g, 1 - g), g = sigmoid(linear(x))."""
        logit = self.linear(x.flatten(1))  # (B, 1)
        return torch.cat((logit, -logit), dim=1).sigmoid()  # 1 - sigmoid(z) = sigmoid(-z)


class LinearGate(_SigmoidGate):
    """Gate of PFL-MF: a linear layer on the flattened input (PFL-MoE, section III).

    Args:
        in_features: number of values per input; None to take it from the first input.
    """

    def __init__(self, in_features: int | None = None) -> None:
        super().__init__(in_features)


class FeatureGate(_SigmoidGate):
    """Gate of PFL-MFE: a linear layer on the features of the global expert's extractor (PFL-MoE, section III).

    Args:
        in_features: number of features; None to take it from the first input.
    """

    reads_features = True

    def __init__(self, in_features: int | None = None) -> None:
        super().__init__(in_features)
