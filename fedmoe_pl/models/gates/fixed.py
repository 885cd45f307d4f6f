"""Gates whose weights are the same for every sample."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models.gates.gate import Gate


class FixedGate(Gate):
    """A gate that gives every sample the same weights, which no optimizer trains.

    The mixture sets the number of experts; until then it is 2.

    Attributes:
        weights: the weight of each expert, a list or a tensor, from 0 to 1; they add up to 1.
    """

    weights: Any

    def __init__(self) -> None:
        super().__init__()
        self.fit_to(2)

    @abstractmethod
    def fit_to(self, num_experts: int) -> None:
        """Sets the weights for a number of experts, unless the gate was constructed with its weights."""

    @property
    def active(self) -> list[int]:
        """Indices of the experts whose weight is above 0."""
        return [index for index, weight in enumerate(self.weights) if weight > 0]

    def forward(self, x: Tensor) -> Tensor:
        """The same weights (B, experts) for every sample; in the default precision if samples are integers."""
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        return torch.cat([x.new_full((1,), weight, dtype=dtype) for weight in self.weights]).expand(x.shape[0], -1)


class GlobalOnly(FixedGate):
    """Uses only the first expert: the global one, or the first cluster's."""

    def fit_to(self, num_experts: int) -> None:
        """Gives the first expert the weight 1."""
        self.weights = [1.0] + [0.0] * (num_experts - 1)


class LocalOnly(FixedGate):
    """Uses only the last expert, which is the local one if there is one."""

    def fit_to(self, num_experts: int) -> None:
        """Gives the last expert the weight 1."""
        self.weights = [0.0] * (num_experts - 1) + [1.0]


class EqualWeights(FixedGate):
    """Gives all experts the same weight."""

    def fit_to(self, num_experts: int) -> None:
        """Gives each expert the same weight."""
        self.weights = [1 / num_experts] * num_experts


class MixtureWeights(FixedGate):
    """Weights that an algorithm estimates for every client, such as the pi of FedEM (Marfoq et al. 2021).

    They are a buffer, ``gate.weights``: no optimizer trains them, but a client can keep them, and checkpoints have
    them. They start equal.

    Attributes:
        weights: shape (experts,); an algorithm may replace them, as long as they are at least 0 and add up to 1.
    """

    weights: Tensor

    @property
    def active(self) -> list[int]:
        """Indices of all experts, because the weights differ between clients and rounds."""
        return [*range(len(self.weights))]

    def fit_to(self, num_experts: int) -> None:
        """Gives each expert the same weight, if their number is another one than before."""
        old = self._buffers.get("weights")
        if old is None or num_experts != len(old):
            new = (torch.empty(0) if old is None else old).new_full((num_experts,), 1 / num_experts)
            self.register_buffer("weights", new)

    def forward(self, x: Tensor) -> Tensor:
        """The same weights (B, experts) for every sample."""
        return self.weights.expand(x.shape[0], -1)


class ConstantGate(FixedGate):
    """A gate with any constant weights; common cases are ``GlobalOnly``, ``LocalOnly`` and ``EqualWeights``.

    Args:
        weight: for two experts, the weight of the global one, from 0 to 1; or a list of all weights, which add up to 1,
            the local expert's last.
    """

    def __init__(self, weight: float | list[float] = 0.5) -> None:
        super().__init__()
        weights: list[float] = weight if isinstance(weight, list) else [weight, 1 - weight]
        if not (weights and all(0 <= value <= 1 for value in weights) and abs(sum(weights) - 1) < 1e-6):
            raise InvalidArgumentError(self, "weight", weight, "from 0 to 1, or a list of such numbers whose sum is 1")
        self.weight = weight
        self.weights = weights

    def fit_to(self, num_experts: int) -> None:
        """Keeps the weights; a mixture with another number of experts refuses the gate."""
