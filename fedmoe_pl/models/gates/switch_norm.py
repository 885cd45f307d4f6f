"""The gate of pFedMoE."""

from __future__ import annotations

from torch import Tensor, nn

from fedmoe_pl.checks import check_sizes
from fedmoe_pl.models.gates.gate import Gate
from fedmoe_pl.models.normalization import SwitchNorm1d


class SwitchNormGate(Gate):
    """Gate of pFedMoE (Yi et al. 2024, https://arxiv.org/abs/2402.01350); 160,004 parameters by default.

    In that paper it weighs the representations of the global and the local expert. In train mode it uses batch
    statistics: a sample's weights depend on its batch, which must have more than one sample.

    Args:
        in_features: number of values per input.
        hidden: width of the hidden layer, which the paper does not give.
        momentum: share of the old running statistics in the new ones in ``SwitchNorm1d``.

    Raises:
        MisconfigurationException: if ``in_features`` is below 2, or the momentum is not between 0 and 1.
    """

    def __init__(self, in_features: int = 3072, hidden: int = 50, momentum: float = 0.9) -> None:
        super().__init__()
        check_sizes(self, in_features=in_features, hidden=hidden)
        self.in_features = in_features
        self.hidden = hidden
        self.momentum = momentum
        self.layers = nn.Sequential(
            nn.Flatten(),  # (B, in_features)
            SwitchNorm1d(in_features, momentum),
            nn.Linear(in_features, hidden),
            nn.BatchNorm1d(hidden),
            nn.Sigmoid(),
            nn.Linear(hidden, 2),
            nn.BatchNorm1d(2),
            nn.Softmax(dim=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Weights (B, 2) = (global expert, local expert) of inputs (B, ...)."""
        return self.layers(x)
