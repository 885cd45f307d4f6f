"""How a group of clients is trained, and on which devices."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedmoe_pl.algorithms.algorithm import Algorithm, Update
from fedmoe_pl.backends.traffic import Traffic
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.trees import Tree


@dataclass(frozen=True)
class GroupUpdate:
    """The result of training a group of clients.

    Attributes:
        update: the updates of its clients, folded with ``Algorithm.combine``.
        kept: what each client keeps, by client.
        sent: how much its clients sent.
    """

    update: Update
    kept: dict[int, Tree]
    sent: Traffic


class Plan(ABC):
    """How the clients of one phase are trained: everything that a backend finds out about the phase, and finds once.

    Attributes:
        training: the local training of the phase's clients.
        description: how the phase is trained, and why; for the log.
    """

    def __init__(self, training: LocalTraining, description: str) -> None:
        self.training = training
        self.description = description

    @abstractmethod
    def begin(self, training: LocalTraining) -> Plan:
        """The same decisions for the phase as it begins; they are not made again.

        All phases are planned before any training, with the untrained model; a phase begins with the tensors that
        earlier phases have left.

        Args:
            training: the phase that was planned, with its true initial tensors, or on another device.

        Returns:
            A new plan, which keeps what rounds can reuse, such as features.
        """

    @abstractmethod
    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """Divides a cohort into the groups that are trained and folded together.

        A sum of floating-point numbers depends on its order. So the groups follow from the phase and the cohort alone,
        never from which device is free, and a result has the same bits wherever it is computed.
        """

    @abstractmethod
    def train_group(self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int) -> GroupUpdate:
        """Trains one group in this process; arguments as in :meth:`train`."""

    def train(self, server: Tree, cohort: Sequence[int], kept: Mapping[int, Tree], round: int) -> Iterator[GroupUpdate]:
        """Trains the cohort and yields its groups in order.

        Args:
            server: the server's state.
            cohort: ids of the clients to train.
            kept: what clients kept from earlier rounds; a client without an entry has kept nothing.
            round: the round of the phase, counted from 0.
        """
        for clients in self.groups(cohort):
            yield self.train_group(server, clients, kept, round)


class Backend(ABC):
    """How clients are trained: settings, and perhaps connections to workers, but nothing about a phase."""

    @abstractmethod
    def plan(self, training: LocalTraining) -> Plan:
        """Looks at a phase once and decides how to train it.

        Args:
            training: the local training of the phase's clients; its tensors may be those of the untrained model.

        Raises:
            MisconfigurationException: if the phase cannot be trained this way.
        """

    def open(self) -> None:  # noqa: B027  (most backends need nothing)
        """Acquires what a run needs, such as a connection to a cluster; called before a run begins.

        Raises:
            MisconfigurationException: if that fails.
        """

    def close(self) -> None:  # noqa: B027  (most backends hold nothing)
        """Releases what it holds between rounds, such as worker processes; the backend can be used again."""


def fold(algorithm: Algorithm, updates: Sequence[Update]) -> Update:
    """Folds updates with ``Algorithm.combine``, in their order."""
    combined = updates[0]
    for update in updates[1:]:
        combined = algorithm.combine(combined, update)
    return combined


def group_update(algorithm: Algorithm, clients: Sequence[int], updates: Sequence[Update]) -> GroupUpdate:
    """The result of a group, from the updates of its clients in their order."""
    kept = {client: update.kept for client, update in zip(clients, updates, strict=True)}
    sent = sum((Traffic.of(update.sent) for update in updates), Traffic())
    return GroupUpdate(fold(algorithm, updates), kept, sent)
