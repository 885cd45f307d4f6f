"""How a group of clients is trained, and on which devices."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from typing_extensions import Self

from fedmoe_pl.aggregation import Aggregation, SecureAggregation
from fedmoe_pl.algorithms.algorithm import Algorithm, request_of
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends.failures import Failure
from fedmoe_pl.backends.fitting import one_thread
from fedmoe_pl.backends.local_client import after_exchange, given_to_others
from fedmoe_pl.backends.traffic import Traffic, Transfer, updates_sent
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.trees import Tree, with_prefix, with_types_of

Chunk = list[list[int]]
"""Groups of clients that are trained in one call, in order."""


Job = Callable[["Plan", Tree, Sequence[Sequence[int]], Mapping[int, Tree]], Sequence[Any]]
"""Work on groups of clients: called with the phase's plan, the server's state, the groups, and the tensors that their
clients keep; returns one result per group."""


@dataclass(frozen=True)
class GroupUpdate:
    """The result of training a group of clients.

    Attributes:
        update: the clients' updates, folded with ``combine`` of the algorithm or the phase's aggregation; None if
            all clients failed.
        clients: the tensors that each client keeps, by client; clients that failed have no entry.
        sent: how much the clients sent.
        transfers: each tensor that the clients sent; empty unless ``LocalTraining.record_transfers`` is set.
        failed: why clients failed, by client.
        logged: the means of what each client's Trainer logged in each local epoch, if it has loggers.
    """

    update: Update | None
    clients: dict[int, Tree]
    sent: Traffic
    transfers: list[Transfer] = field(default_factory=list)
    failed: dict[int, Failure] = field(default_factory=dict)
    logged: dict[int, list[dict[str, float]]] = field(default_factory=dict)


class Plan(ABC):
    """How the clients of one phase are trained: all that a backend decides about a phase, once.

    Attributes:
        training: the local training of the phase's clients.
        description: how the phase is trained, and why; for the log.
    """

    def __init__(self, training: LocalTraining, description: str) -> None:
        self.training = training
        self.description = description

    def begin(self, training: LocalTraining) -> Self:
        """Returns the plan to use in the phase: the same decisions, with room for what later rounds can reuse.

        All phases are planned before any training, with the untrained model. When a phase begins, its initial tensors
        may come from earlier phases.

        Args:
            training: the planned training with the phase's initial tensors, or on another device.
        """
        plan = copy.copy(self)
        plan.training = training
        return plan

    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """Divides a cohort into groups that are trained and folded together; by default, each client is a group.

        A sum of floating-point numbers depends on its order. Groups therefore depend only on the phase and the cohort,
        not on which device is free, and the result is bit-identical wherever it is computed.
        """
        return [[client] for client in cohort]

    def chunks(self, groups: Sequence[list[int]], at_least: int = 1) -> list[Chunk]:
        """Divides the groups into chunks of neighbours that are trained in one call; by default, one group each.

        The division does not affect the result.

        Args:
            groups: the groups of a cohort, in order.
            at_least: the smallest number of chunks to make, if there are enough groups.
        """
        return [[group] for group in groups]

    @abstractmethod
    def train_groups(
        self, server: Tree, groups: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
    ) -> list[GroupUpdate]:
        """Trains some groups in this process; other arguments as in :meth:`train`."""

    def map(self, job: Job, server: Tree, groups: Sequence[list[int]], kept: Mapping[int, Tree]) -> Iterator[Any]:
        """Does work other than training, such as evaluation, on groups of clients; yields their results in order.

        Args:
            job: what to do; must be picklable.
            server: the server's state.
            groups: ids of the clients of each group.
            kept: the tensors that clients keep, by client.
        """
        yield from job(self, server, groups, kept)

    def announce(  # noqa: B027  (most plans start training only in `train`)
        self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int
    ) -> None:
        """Announces the next cohort before the current models are evaluated; other arguments as in :meth:`train`.

        A plan may start this training at once, if it uses the result only in a :meth:`train` of these clients, and with
        equal arguments.
        """

    def before_another_try(self) -> None:  # noqa: B027  (in most plans, clients are always reachable)
        """Called when too few clients answered, before the round is retried."""

    def requests(self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int) -> dict[int, Tree]:
        """What each client asks the server for before its training; other arguments as in :meth:`train`."""
        algorithm = self.training.algorithm
        asked = kept if algorithm.messages.request else {}  # otherwise kept tensors, perhaps on disk, are not read
        return {client: request_of(algorithm, asked.get(client, {})) for client in clients}

    def exchange(
        self, server: Tree, kept: Mapping[int, Tree], failed: Collection[int], round: int
    ) -> Iterator[tuple[int, Tree, Tree, Tree]]:
        """Lets clients send each other tensors; clients in ``failed`` neither send nor receive.

        The other arguments are those of :meth:`train`.

        Yields:
            A client, the tensors that it keeps from now on, the tensors that the server sent it, and the tensors that
            other clients sent it, their names prefixed with the sender's id and a dot.
        """
        algorithm, clients = self.training.algorithm, [client for client in kept if client not in failed]
        for client, sent, parts in algorithm.exchange(server, clients, round):
            received: Tree = {}
            for sender, of_sender in parts.items():
                given = given_to_others(algorithm, kept[sender], of_sender, round)
                received |= with_prefix(given, f"{sender}.")
            own = kept[client]
            yield client, after_exchange(algorithm, client, own, {**sent, **received}), sent, received

    def train(
        self, server: Tree, groups: Sequence[list[int]], kept: Mapping[int, Tree], round: int
    ) -> Iterator[GroupUpdate]:
        """Trains groups of clients and yields their results in order.

        Args:
            server: the server's state.
            groups: ids of the clients of each group; of a cohort, :meth:`groups`.
            kept: the tensors that clients kept from earlier rounds; a client without an entry kept none.
            round: the round of the phase, counted from 0.
        """
        for chunk in self.chunks(groups):
            yield from self.train_groups(server, chunk, kept, round)


class Backend(ABC):
    """How clients are trained: holds settings and perhaps connections to workers, but nothing about a phase."""

    @abstractmethod
    def plan(self, training: LocalTraining) -> Plan:
        """Decides once how to train a phase.

        Args:
            training: the local training of the phase's clients; its tensors may be those of the untrained model.

        Raises:
            MisconfigurationException: if this backend cannot train the phase.
        """

    def open(self) -> None:  # noqa: B027  (most backends need nothing)
        """Acquires what a run needs, such as a connection to a cluster; called before a run begins.

        Raises:
            MisconfigurationException: if something that the run needs is missing, such as the cluster.
        """

    def close(self) -> None:  # noqa: B027  (most backends hold nothing)
        """Releases what the backend holds between rounds, such as worker processes; it can be used again."""


def group_size(training: LocalTraining, clients: Sequence[int]) -> int:
    """The number of a group's training samples, a measure of its training time."""
    return sum(len(training.datamodule.train_samples[client]) for client in clients)


def fold(algorithm: Algorithm | Aggregation | SecureAggregation, updates: Sequence[Update]) -> Update:
    """Folds updates, in order, with the ``combine`` of an algorithm or aggregation."""
    combined = updates[0]
    with one_thread():
        for update in updates[1:]:
            combined = algorithm.combine(combined, update)
    return combined


def updated_server(algorithm: Algorithm, server: Tree, combined: Update) -> Tree:
    """The server's next state, computed from the folded updates; tensors keep the data types of the current state."""
    combined = replace(combined, sent=with_types_of(server, combined.sent))
    return with_types_of(server, algorithm.server_update(server, combined))


def group_updates(
    training: LocalTraining,
    groups: Iterable[Sequence[int]],
    updates: Mapping[int, Update | Failure],
    logged: Mapping[int, list[dict[str, float]]] | None = None,
) -> list[GroupUpdate]:
    """The results of groups, given each client's update, or why it failed, and what it logged."""
    groups = [*groups]
    for copies in {training.of(client).copies for group in groups for client in group}:  # even if a client failed
        copies.check(training.algorithm)
    return [_group_update(training, {client: updates[client] for client in group}, logged or {}) for group in groups]


def _group_update(
    training: LocalTraining, updates: Mapping[int, Update | Failure], logged: Mapping[int, list[dict[str, float]]]
) -> GroupUpdate:
    failed = {client: failure for client, failure in updates.items() if isinstance(failure, Failure)}
    answered = {client: update for client, update in updates.items() if isinstance(update, Update)}
    kept = {client: update.state for client, update in answered.items()}
    sent = sum((Traffic.of(update.sent) for update in answered.values()), Traffic())
    recorded = answered if training.record_transfers else {}
    masked = training.secure_aggregation is not None
    transfers = [each for client, update in recorded.items() for each in updates_sent(client, update.sent, masked)]
    folded = fold(training.combining, [*answered.values()]) if answered else None
    return GroupUpdate(folded, kept, sent, transfers, failed, {each: logged[each] for each in kept if each in logged})
