"""A client as an algorithm's hooks see it, and its update."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Generator, Tensor

from fedmoe_pl.data import FederatedDataModule, SampleBatches
from fedmoe_pl.seeds import Purpose, derive_seed
from fedmoe_pl.trees import Tree

Constants = dict[str, Any]
"""What ``client_init`` returns for the loss; backends move its tensors to the training's device."""
Exchange = Iterator[tuple[int, Tree, Mapping[int, Sequence[str]]]]
"""Clients, what the server sends each of them, and which parts it receives from other clients, by their ids."""


@dataclass
class Client:
    """One client in one round, as the hooks see it.

    Attributes:
        id: the client's id.
        round: the round of the phase, counted from 0.
        seed: the run's seed.
        module: the client's own copy of the phase's module.
        samples: indices of its training samples, shape (n,).
        state: the tensors that it keeps, from earlier rounds and phases.
        datamodule: the data of all clients; already set up.
        loaded: the phase's initial tensors, replaced by those that the server sent; the same for all clients that
            received the same tensors.
        steps: number of optimizer steps in its local training, until the best epoch if that was restored; 0 before it.
        rounds: the phase's number of rounds.
        rounds_before: the number of rounds of the phases that this one goes on from.
        participants: ids of the clients that take part in the phase, from which its rounds are drawn.
    """

    id: int
    round: int
    seed: int
    module: LightningModule
    samples: Tensor
    state: Tree
    datamodule: FederatedDataModule
    loaded: Tree = field(default_factory=dict)
    steps: int = 0
    rounds: int = 1
    rounds_before: int = 0
    participants: Sequence[int] = ()

    def batches(self, samples: Tensor) -> SampleBatches:
        """Large batches for the evaluation of models: in the order of ``samples`` and not augmented.

        Args:
            samples: indices, such as ``self.samples``, shape (n,).
        """
        return self.datamodule.batches(samples, batch_size=self.datamodule.evaluated_at_once)

    def shuffled_samples(self, purpose: int) -> Tensor:
        """Its training samples in an order that is the same in every phase and round.

        Args:
            purpose: a number that tells one use from others, so that two splits are independent of each other.
        """
        generator = Generator().manual_seed(derive_seed(self.seed, Purpose.SPLIT, self.id, purpose))
        return self.samples[torch.randperm(len(self.samples), generator=generator)]

    def generator(self, purpose: int) -> Generator:
        """Random numbers of the round for one purpose, so that training does not depend on how many were drawn.

        Args:
            purpose: a number from 100 on that tells one use from others; those below are the package's.
        """
        return Generator().manual_seed(derive_seed(self.seed, purpose, self.id, self.rounds_before + self.round))


@dataclass
class Update:
    """The result of one client's local training or, after ``Algorithm.combine``, of several clients' training.

    Attributes:
        sent: the tensors that the client sends to the server.
        weight: its weight in the aggregation.
        state: the tensors that the client keeps until it is trained again; empty after ``combine``.
    """

    sent: Tree
    weight: float
    state: Tree = field(default_factory=dict)
