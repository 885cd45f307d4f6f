"""Gates of one linear layer, those of PFL-MoE and FedMoE-DA."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedmoe_pl.models.gates.gate import Gate


class _SigmoidGate(Gate):
    """A linear layer and a sigmoid; if the layer's width is None, the first input sets it."""

    def __init__(self, in_features: int | None = None) -> None:
        super().__init__()
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


class FeatureGate(_SigmoidGate):
    """Gate of PFL-MFE: a linear layer on the features of the global expert's extractor (PFL-MoE, section III).

    Args:
        in_features: number of features; None to take it from the first input.
    """

    reads_features = True


class ProxyGate(Gate):
    """Gate of FedMoE-DA (Zhan et al. 2024, Eq. 1): a linear layer without bias and a softmax.

    An expert's proxy is its column of the layer's matrix in the paper. Here each proxy is a separate layer,
    ``gate.proxies.<expert>``, with the initial values of ``torch.nn.Linear``.

    Args:
        num_experts: number of experts.
        in_features: number of values per sample; None to take it from the first input.
    """

    def __init__(self, num_experts: int = 4, in_features: int | None = None) -> None:
        super().__init__()

        def proxy() -> nn.Linear:
            return nn.LazyLinear(1, bias=False) if in_features is None else nn.Linear(in_features, 1, bias=False)

        self.proxies = nn.ModuleList(proxy() for _ in range(num_experts))

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return len(self.proxies)

    @property
    def in_features(self) -> int | None:
        """Number of values that the gate reads per sample; None until a lazy gate has read its first input."""
        return self.proxies[0].in_features or None  # pyright: ignore[reportReturnType]

    def forward(self, x: Tensor) -> Tensor:
        """Weights (B, experts) of inputs (B, ...)."""
        x = x.flatten(1)
        return torch.cat([proxy(x) for proxy in self.proxies], dim=1).softmax(dim=1)
