"""The gate of PM-MoE: a perceptron with three hidden layers."""

from __future__ import annotations

from torch import Tensor, nn

from fedmoe_pl.checks import MOST_EXPERTS, check_at_least, check_sizes
from fedmoe_pl.models.gates.gate import Gate
from fedmoe_pl.models.layers import check_dropout


class MLPGate(Gate):
    """A perceptron and a softmax (PM-MoE, Feng et al., WWW 2025; widths, activations and dropout from its code).

    The weights of all layers start orthogonal. Where the first input sets the first layer's width, this is so only
    after ``reset_parameters``, which ``PMMoE`` calls for each client.

    Args:
        num_experts: number of experts to weigh.
        in_features: number of values that the gate reads per sample; None to take it from the first input.
        reads_features: whether it reads the features of the mixture's extractor instead of the input.
        dropout: dropout probability after each hidden layer.

    Raises:
        MisconfigurationException: if ``num_experts`` is below 1, or ``dropout`` is not in [0, 1).
    """

    def __init__(
        self, num_experts: int, in_features: int | None = None, reads_features: bool = True, dropout: float = 0.1
    ) -> None:
        super().__init__()
        check_sizes(self, in_features=in_features)
        check_at_least(self, "num_experts", num_experts, 1, MOST_EXPERTS)
        check_dropout(self, dropout)
        self.num_experts = num_experts
        self.reads_features = reads_features
        self.dropout = dropout
        first = nn.LazyLinear(128) if in_features is None else nn.Linear(in_features, 128)
        layers: list[nn.Module] = [first, nn.ReLU(), nn.Dropout(dropout)]
        for size_in, size_out in ((128, 256), (256, 128)):
            layers += [nn.Linear(size_in, size_out), nn.LeakyReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(128, num_experts))
        if in_features is not None:
            self.reset_parameters()

    @property
    def in_features(self) -> int | None:
        """Number of values that the gate reads per sample; None until a lazy gate has read its first input."""
        return self.layers[0].in_features or None  # pyright: ignore[reportReturnType]

    def reset_parameters(self) -> None:
        """Draws all parameters anew, with orthogonal weights."""
        super().reset_parameters()
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Weights (B, num_experts), the softmax of the last layer's outputs."""
        return self.layers(x.flatten(1)).softmax(1)
