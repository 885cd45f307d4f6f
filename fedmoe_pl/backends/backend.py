"""How a group of clients is trained, and on which devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import LightningModule

from fedmoe_pl.aggregation import Tree
from fedmoe_pl.algorithm import Algorithm, Update
from fedmoe_pl.data import FederatedDataModule


@dataclass(frozen=True)
class LocalTraining:
    """All that the clients of one phase have in common.

    Attributes:
        module: the phase's module with its initial tensors; never trained itself.
        initial: those tensors by name, on the CPU.
        algorithm: the phase's algorithm.
        datamodule: who holds which data; already set up.
        trainer: arguments of every client's ``Trainer``, but for its devices.
        batch_size: overrides the data module's batch size; None keeps it.
        seed: the run's seed.
        rounds: number of rounds of the phase.
        device: where clients train.
    """

    module: LightningModule
    initial: Tree
    algorithm: Algorithm
    datamodule: FederatedDataModule
    trainer: dict[str, Any]
    batch_size: int | None
    seed: int
    rounds: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def max_epochs(self) -> int:
        """Local epochs of a client."""
        return self.trainer["max_epochs"]


@dataclass(frozen=True)
class GroupUpdate:
    """What comes of training a group of clients.

    Attributes:
        update: the group's updates, folded with ``Algorithm.combine``.
        kept: what each of its clients keeps, by client.
    """

    update: Update
    kept: dict[int, Tree]


class Backend(ABC):
    """Trains the clients of a round."""

    @abstractmethod
    def groups(self, training: LocalTraining, cohort: Sequence[int]) -> list[list[int]]:
        """Divides a cohort into the groups that are trained and folded together.

        Sums of floating-point numbers depend on their order, so that a result has the same bits wherever it is
        computed only if the groups follow from the phase and the cohort, never from what is free or done.
        """

    @abstractmethod
    def train_group(
        self, training: LocalTraining, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int
    ) -> GroupUpdate:
        """Trains one group; arguments as in :meth:`train`."""

    def train(
        self, training: LocalTraining, server: Tree, cohort: Sequence[int], kept: Mapping[int, Tree], round: int
    ) -> Iterator[GroupUpdate]:
        """Trains the cohort and yields its groups in order.

        Args:
            training: what all clients of the phase have in common.
            server: the server's state.
            cohort: ids of the clients to train.
            kept: what clients kept from earlier; a client without an entry has kept nothing.
            round: the round of the phase, counted from 0.
        """
        for clients in self.groups(training, cohort):
            yield self.train_group(training, server, clients, kept, round)

    def choose(self, training: LocalTraining) -> Backend:
        """The backend that trains the groups of this phase: itself, unless it is one that chooses.

        Raises:
            MisconfigurationException: with one sentence, if the phase cannot be trained this way.
        """
        return self

    def open(self) -> None:  # noqa: B027  most need nothing
        """Takes what a run needs, such as a connection to a cluster; called before a run begins.

        Raises:
            MisconfigurationException: with one sentence, if it cannot be had.
        """

    def close(self) -> None:  # noqa: B027  most hold nothing
        """Releases what it holds between rounds, such as worker processes; it can be used again."""


def fold(algorithm: Algorithm, updates: Sequence[Update]) -> Update:
    """Folds updates with ``Algorithm.combine``, in their order."""
    combined = updates[0]
    for update in updates[1:]:
        combined = algorithm.combine(combined, update)
    return combined
