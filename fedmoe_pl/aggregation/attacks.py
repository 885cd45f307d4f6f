"""Attacks, to measure in experiments what an aggregation withstands."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Generator, Tensor

from fedmoe_pl.aggregation.aggregation import Cohort
from fedmoe_pl.aggregation.robust import CollectingAggregation, RobustAggregation
from fedmoe_pl.checks import InvalidArgumentError, check_number
from fedmoe_pl.trees import Tree


class Attack(ABC):
    """What all attackers of a round send, computed from what the other clients send."""

    @abstractmethod
    def __call__(self, honest: Tensor, generator: Generator) -> Tensor:
        """The attackers' change of the model, shape (d,).

        Args:
            honest: the changes of the other clients, shape (n, d).
            generator: random numbers of the round.
        """


class InnerProductManipulation(Attack):
    """Minus ``scale`` times the mean change (Xie et al., UAI 2020); with a scale of 1, sign flipping.

    Args:
        scale: the factor.
    """

    def __init__(self, scale: float = 2.0) -> None:
        check_number(self, "scale", scale, above=0)
        self.scale = scale

    def __call__(self, honest: Tensor, generator: Generator) -> Tensor:
        """Minus the mean."""
        return -self.scale * honest.mean(0)


class ALittleIsEnough(Attack):
    """The mean change plus ``scale`` times each coordinate's standard deviation (Baruch et al., NeurIPS 2019).

    Args:
        scale: z, the number of standard deviations.
    """

    def __init__(self, scale: float = 1.5) -> None:
        self.scale = scale

    def __call__(self, honest: Tensor, generator: Generator) -> Tensor:
        """The shifted mean; the mean itself if there is one honest client."""
        return honest.mean(0) + self.scale * honest.std(0, correction=int(len(honest) > 1))


class GaussianNoise(Attack):
    """Noise in place of a change.

    Args:
        std: standard deviation of each coordinate.
    """

    def __init__(self, std: float = 1.0) -> None:
        check_number(self, "std", std, above=0)
        self.std = std

    def __call__(self, honest: Tensor, generator: Generator) -> Tensor:
        """Draws the noise."""
        return self.std * torch.randn(honest.shape[1], generator=generator, dtype=honest.dtype)


class UnderAttack(CollectingAggregation):
    """An aggregation of which some clients are attackers; for experiments only.

    The attackers train as the others do, see what all others send, and send the attack in place of their own update.

    Args:
        attack: what they send.
        attackers: their ids.
        aggregation: aggregates all updates; None for the algorithm's weighted mean.
    """

    def __init__(self, attack: Attack, attackers: Sequence[int], aggregation: RobustAggregation | None = None) -> None:
        self.attack = attack
        self.attackers = list(attackers)
        self.aggregation = aggregation
        self.min_clients = 1 if aggregation is None else aggregation.min_clients

    def check(self, shared: Tree, parameters: set[str], cohort: Cohort) -> None:
        """Refuses attackers that take no part."""
        absent = [client for client in self.attackers if client not in cohort.participants]
        if absent:
            because = f"{absent[0]} takes no part"
            raise InvalidArgumentError(self, "attackers", self.attackers, "ids of clients that take part", because)

    def of_clients(
        self, clients: Sequence[int], vectors: Tensor, weights: Sequence[float], generator: Generator
    ) -> Tensor:
        """Replaces the attackers' vectors, and aggregates."""
        attacks = torch.tensor([client in self.attackers for client in clients])
        if attacks.any() and not attacks.all():
            vectors = vectors.clone()
            vectors[attacks] = self.attack(vectors[~attacks], generator)
        if self.aggregation is not None:
            return self.aggregation.of_clients(clients, vectors, weights, generator)
        shares = torch.tensor(weights, dtype=vectors.dtype)
        return shares @ vectors / shares.sum()
