"""How a group of clients is trained, and on which devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        trainer: arguments of every client's ``Trainer``.
        batch_size: overrides the data module's batch size; None keeps it.
        seed: the run's seed.
    """

    module: LightningModule
    initial: Tree
    algorithm: Algorithm
    datamodule: FederatedDataModule
    trainer: dict[str, Any]
    batch_size: int | None
    seed: int


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
    def train(
        self, training: LocalTraining, server: Tree, cohort: Sequence[int], kept: Mapping[int, Tree], round: int
    ) -> Iterator[GroupUpdate]:
        """Trains the cohort, in groups that depend on the cohort alone, and yields the groups in order.

        Args:
            training: what all clients of the phase have in common.
            server: the server's state.
            cohort: ids of the clients to train.
            kept: what clients kept from earlier; a client without an entry has kept nothing.
            round: the round of the phase, counted from 0.
        """
