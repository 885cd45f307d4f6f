"""How a group of clients is trained, and on which devices."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
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
"""Work for some groups of clients: gets the phase's plan, the server's state, the groups, and the tensors that their
clients keep; gives a result for each group."""


@dataclass(frozen=True)
class GroupUpdate:
    """The result of training a group of clients.

    Attributes:
        update: the updates of its clients, folded with ``combine`` of the algorithm or the phase's aggregation; None if
            all of them failed.
        clients: the tensors that each client keeps, by client, without those that failed.
        sent: how much its clients sent.
        transfers: each tensor that they sent, if ``LocalTraining.record_transfers``; otherwise none.
        failed: why clients failed, by client.
        logged: the means of what the Trainer of each client has logged in each local epoch, if it has loggers.
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
        """A plan with the same decisions for the start of the phase, which holds what rounds can reuse.

        All phases are planned before any training, with the untrained model. When a phase begins, its initial tensors
        come from earlier phases.

        Args:
            training: the planned training, now with its initial tensors, or on another device.
        """
        plan = copy.copy(self)
        plan.training = training
        return plan

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out cached properties, such as features, of a copy and in another process."""
        kind, values = type(self), vars(self).items()
        return {name: value for name, value in values if not isinstance(getattr(kind, name, None), cached_property)}

    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """Divides a cohort into the groups that are trained and folded together; by default, each client is alone.

        A sum of floating-point numbers depends on its order. Therefore the groups depend on the phase and the cohort
        only, not on which device is free, and the result has the same bits wherever it is computed.
        """
        return [[client] for client in cohort]

    def chunks(self, groups: Sequence[list[int]], at_least: int = 1) -> list[Chunk]:
        """Divides the groups into neighbours that are trained in one call; by default, each group is alone.

        What is trained together changes nothing in the result.

        Args:
            groups: the groups of a cohort, in order.
            at_least: how many chunks there should be at least, if the groups can be so divided.
        """
        return [[group] for group in groups]

    @abstractmethod
    def train_groups(
        self, server: Tree, groups: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
    ) -> list[GroupUpdate]:
        """Trains some groups in this process; other arguments as in :meth:`train`."""

    def map(self, job: Job, server: Tree, groups: Sequence[list[int]], kept: Mapping[int, Tree]) -> Iterator[Any]:
        """Does other work than training for groups of clients, such as their evaluation; yields their results in order.

        Args:
            job: what to do; it must be possible to pickle it.
            server: the server's state.
            groups: ids of the clients of each group.
            kept: the tensors that clients keep, by client.
        """
        yield from job(self, server, groups, kept)

    def announce(  # noqa: B027  (most plans train when they are asked to)
        self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int
    ) -> None:
        """Says who is trained next, before these models are evaluated; arguments as in :meth:`train`.

        A plan may have them trained at once, if it uses the result only where :meth:`train` is called with the same.
        """

    def before_another_try(self) -> None:  # noqa: B027  (most plans' clients are always there)
        """Called when too few clients have answered, before the round is tried again."""

    def requests(self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int) -> dict[int, Tree]:
        """What clients ask the server for before their training, by client; arguments as in :meth:`train`."""
        algorithm = self.training.algorithm  # if it has no requests, what clients keep, perhaps on disk, is not read
        return {client: request_of(algorithm, kept.get(client, {}) if algorithm.request else {}) for client in clients}

    def exchange(
        self, server: Tree, kept: Mapping[int, Tree], failed: Collection[int], round: int
    ) -> Iterator[tuple[int, Tree, Tree, Tree]]:
        """Lets clients send each other tensors; those that failed in the round neither send nor receive.

        Other arguments as in :meth:`train`.

        Yields:
            A client, the tensors that it keeps from now on, those that the server sent it, and those that it received
            from other clients, each with the sender's id and a dot before its name.
        """
        algorithm, clients = self.training.algorithm, [client for client in kept if client not in failed]
        for client, sent, parts in algorithm.exchange(server, clients, round):
            received: Tree = {}
            for sender, of_sender in parts.items():
                given = given_to_others(algorithm, kept[sender], of_sender, round)
                received |= with_prefix(given, f"{sender}.")
            own = kept[client]
            yield client, after_exchange(algorithm, client, own, {**sent, **received}), sent, received

    def train(self, server: Tree, cohort: Sequence[int], kept: Mapping[int, Tree], round: int) -> Iterator[GroupUpdate]:
        """Trains the cohort and yields its groups in order.

        Args:
            server: the server's state.
            cohort: ids of the clients to train.
            kept: the tensors that clients kept from earlier rounds; a client without an entry has kept none.
            round: the round of the phase, counted from 0.
        """
        for groups in self.chunks(self.groups(cohort)):
            yield from self.train_groups(server, groups, kept, round)


class Backend(ABC):
    """How clients are trained. It holds settings and perhaps connections to workers, but nothing about a phase."""

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
            MisconfigurationException: if the run's needs cannot be met, for example because there is no cluster.
        """

    def close(self) -> None:  # noqa: B027  (most backends hold nothing)
        """Releases what the backend holds between rounds, such as worker processes; it can be used again."""


def group_size(training: LocalTraining, clients: Sequence[int]) -> int:
    """Number of training samples of a group, as a measure of its training time."""
    return sum(len(training.datamodule.train_samples[client]) for client in clients)


def fold(algorithm: Algorithm | Aggregation | SecureAggregation, updates: Sequence[Update]) -> Update:
    """Folds updates with the ``combine`` of an algorithm or aggregation, in their order."""
    combined = updates[0]
    with one_thread():
        for update in updates[1:]:
            combined = algorithm.combine(combined, update)
    return combined


def updated_server(algorithm: Algorithm, server: Tree, combined: Update) -> Tree:
    """The server's next state from the folded updates, in the data types that it has."""
    combined = replace(combined, sent=with_types_of(server, combined.sent))
    return with_types_of(server, algorithm.server_update(server, combined))


def group_updates(
    training: LocalTraining,
    groups: Iterable[Sequence[int]],
    updates: Mapping[int, Update | Failure],
    logged: Mapping[int, list[dict[str, float]]] | None = None,
) -> list[GroupUpdate]:
    """The results of groups, from the update of each client, or why it failed, and what the client logged."""
    groups = [*groups]
    for copies in {training.of(client).copies for group in groups for client in group}:  # also of those that failed
        copies.check(training.algorithm)
    results = [_group_update(training, {client: updates[client] for client in group}) for group in groups]
    for result in results:
        result.logged.update({client: logged[client] for client in result.clients if logged and client in logged})
    return results


def _group_update(training: LocalTraining, updates: Mapping[int, Update | Failure]) -> GroupUpdate:
    failed = {client: failure for client, failure in updates.items() if isinstance(failure, Failure)}
    answered = {client: update for client, update in updates.items() if isinstance(update, Update)}
    kept = {client: update.state for client, update in answered.items()}
    sent = sum((Traffic.of(update.sent) for update in answered.values()), Traffic())
    recorded = answered if training.record_transfers else {}
    masked = training.secure_aggregation is not None
    transfers = [each for client, update in recorded.items() for each in updates_sent(client, update.sent, masked)]
    folded = fold(training.combining, [*answered.values()]) if answered else None
    return GroupUpdate(folded, kept, sent, transfers, failed)
