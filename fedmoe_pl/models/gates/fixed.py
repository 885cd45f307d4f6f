"""Gates whose weights are the same for every sample."""

from __future__ import annotations

from abc import abstractmethod

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fedmoe_pl.models.gates.gate import Gate


class FixedGate(Gate):
    """A gate that gives every sample the same weights and is never trained.

    Attributes:
        weights: the weight of each expert, from 0 to 1; they add up to 1.
    """

    weights: list[float]

    @abstractmethod
    def fit_to(self, num_experts: int) -> None:
        """Sets the weights for a number of experts, unless the gate was constructed with its weights.

        Args:
            num_experts: number of experts of the mixture.
        """

    @property
    def active(self) -> list[int]:
        """Indices of the experts whose weight is above 0."""
        return [index for index, weight in enumerate(self.weights) if weight > 0]

    def forward(self, x: Tensor) -> Tensor:
        """The same weights (B, experts) for every sample; in the default precision if samples are integers."""
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        return torch.cat([x.new_full((1,), weight, dtype=dtype) for weight in self.weights]).expand(len(x), -1)


class GlobalOnly(FixedGate):
    """Uses only the first expert: the global one, or the first cluster's.

    The mixture sets the number of experts; until then it is 2.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fit_to(2)

    def fit_to(self, num_experts: int) -> None:
        """Gives the first expert the weight 1."""
        self.weights = [1.0] + [0.0] * (num_experts - 1)


class LocalOnly(FixedGate):
    """Uses only the last expert, which is the local one if there is one.

    The mixture sets the number of experts; until then it is 2.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fit_to(2)

    def fit_to(self, num_experts: int) -> None:
        """Gives the last expert the weight 1."""
        self.weights = [0.0] * (num_experts - 1) + [1.0]


class EqualWeights(FixedGate):
    """Gives all experts the same weight.

    The mixture sets the number of experts; until then it is 2.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fit_to(2)

    def fit_to(self, num_experts: int) -> None:
        """Gives each expert the same weight."""
        self.weights = [1 / num_experts] * num_experts


class ConstantGate(FixedGate):
    """A gate with any constant weights; common cases are ``GlobalOnly``, ``LocalOnly`` and ``EqualWeights``.

    Args:
        weight: for two experts, the weight of the global one, from 0 to 1; or a list of all weights, which add up to 1,
            the local expert's last.

    Raises:
        MisconfigurationException: if a weight is not between 0 and 1, or a list does not add up to 1.
    """

    def __init__(self, weight: float | list[float] = 0.5) -> None:
        super().__init__()
        weights: list[float] = weight if isinstance(weight, list) else [weight, 1 - weight]
        if not (weights and all(0 <= value <= 1 for value in weights) and abs(sum(weights) - 1) < 1e-6):
            sum_to_1 = " and add up to 1" if isinstance(weight, list) else ""
            raise MisconfigurationException(f"ConstantGate: weight is {weight}, but must be from 0 to 1{sum_to_1}.")
        self.weight = weight
        self.weights = weights

    def fit_to(self, num_experts: int) -> None:
        """Keeps the weights; a mixture with another number of experts refuses the gate."""
