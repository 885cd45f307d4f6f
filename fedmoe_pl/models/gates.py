"""Gates: for every sample, the weights of the global experts and of the local expert.

A gate returns weights of shape (B, experts) that are at least 0 and add up to 1. Global experts always come first, the
local one is the last (the papers differ; METHODS section 0, finding 6): with two, index 0 is the global expert.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from fedmoe_pl.models.layers import draw_anew


class Gate(nn.Module, ABC):
    """What weighs the experts.

    Attributes:
        reads_features: whether the gate is given the features of the global expert's extractor in place of the input.
    """

    reads_features: bool = False

    @abstractmethod
    def forward(self, x: Tensor) -> Tensor:
        """Weights of shape (B, experts), the local expert's last.

        Args:
            x: the input (B, ...), or the features (B, F) where ``reads_features`` is set.
        """

    def reset_parameters(self) -> None:
        """Draws new initial parameters of all layers, as PFL-MoE does for every client."""
        for part in self.children():
            draw_anew(part)


class FixedGate(Gate):
    """A gate that gives every sample the same weights and is never trained.

    Attributes:
        weights: the weight of each expert, from 0 to 1; they add up to 1.
    """

    weights: list[float]

    @abstractmethod
    def fit_to(self, num_experts: int) -> None:
        """Takes the number of experts from the mixture, unless the gate was given a weight for each.

        Args:
            num_experts: number of experts of the mixture.
        """

    @property
    def active(self) -> list[int]:
        """Indices of the experts whose weight is above 0."""
        return [index for index, weight in enumerate(self.weights) if weight > 0]

    def forward(self, x: Tensor) -> Tensor:
        """The same weights (B, experts) for every sample; in the default precision where samples are integers."""
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        return torch.cat([x.new_full((1,), weight, dtype=dtype) for weight in self.weights]).expand(len(x), -1)


class GlobalOnly(FixedGate):
    """The first expert alone: the global one, of several clusters the first.

    The number of experts is that of the mixture; 2 before the gate is in one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fit_to(2)

    def fit_to(self, num_experts: int) -> None:
        """Gives the first of so many experts the weight 1."""
        self.weights = [1.0] + [0.0] * (num_experts - 1)


class LocalOnly(FixedGate):
    """The last expert alone, which is the local one where there is one.

    The number of experts is that of the mixture; 2 before the gate is in one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fit_to(2)

    def fit_to(self, num_experts: int) -> None:
        """Gives the last of so many experts the weight 1."""
        self.weights = [0.0] * (num_experts - 1) + [1.0]


class EqualWeights(FixedGate):
    """The mean of all experts.

    The number of experts is that of the mixture; 2 before the gate is in one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fit_to(2)

    def fit_to(self, num_experts: int) -> None:
        """Gives each of so many experts the same weight."""
        self.weights = [1 / num_experts] * num_experts


class ConstantGate(FixedGate):
    """A gate held at given weights. :class:`GlobalOnly`, :class:`LocalOnly` and :class:`EqualWeights` need none.

    Args:
        weight: weight of the global expert, from 0 to 1; where there are more than two experts, a list of all weights,
            the local expert's last, that add up to 1.

    Raises:
        MisconfigurationException: if a weight is not between 0 and 1, or a list does not add up to 1.
    """

    def __init__(self, weight: float | list[float] = 0.5) -> None:
        super().__init__()
        weights: list[float] = weight if isinstance(weight, list) else [weight, 1 - weight]
        if not (weights and all(0 <= value <= 1 for value in weights) and abs(sum(weights) - 1) < 1e-6):
            allowed = (
                "weights must be from 0 to 1 and add up to 1"
                if isinstance(weight, list)
                else ("the global expert's weight must be from 0 to 1")
            )
            raise MisconfigurationException(f"gate.init_args.weight is {weight}, but {allowed}.")
        self.weight = weight
        self.weights = weights

    def fit_to(self, num_experts: int) -> None:
        """Keeps the weights: the mixture refuses them where it has another number of experts."""


class _SigmoidGate(Gate):
    """One linear layer and a sigmoid; the layer's width follows from the first input where it is not given."""

    def __init__(self, in_features: int | None) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(1) if in_features is None else nn.Linear(in_features, 1)

    @property
    def in_features(self) -> int | None:
        """Number of values the gate reads per sample; None until a lazy gate has seen its first input."""
        return self.linear.in_features or None

    def forward(self, x: Tensor) -> Tensor:
        """Weights (B, 2) = (g, 1 - g), g = sigmoid(linear(x))."""
        logit = self.linear(x.flatten(1))  # (B, 1)
        return torch.cat((logit, -logit), dim=1).sigmoid()  # 1 - sigmoid(z) = sigmoid(-z)


class LinearGate(_SigmoidGate):
    """Gate of PFL-MF: a linear layer on the flattened input (PFL-MoE, section III; METHODS section 4).

    Args:
        in_features: number of values per input; None takes it from the first input.
    """

    def __init__(self, in_features: int | None = None) -> None:
        super().__init__(in_features)


class FeatureGate(_SigmoidGate):
    """Gate of PFL-MFE: a linear layer on the features of the global expert's extractor (PFL-MoE, section III).

    Args:
        in_features: number of features; None takes it from the first input.
    """

    reads_features = True

    def __init__(self, in_features: int | None = None) -> None:
        super().__init__(in_features)
