"""How the server combines what clients send, in place of the algorithm's weighted mean."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Generator

from fedmoe_pl.algorithms.client import Client, Update
from fedmoe_pl.trees import Tree

PREFIX = "aggregation/"
"""Prefix of the names of an aggregation's own tensors."""


@dataclass(frozen=True)
class Cohort:
    """How many clients train in a round.

    Attributes:
        size: their number; with Poisson sampling, the expected one.
        participants: ids of the clients that they are drawn from.
    """

    size: int
    participants: Sequence[int]


class Aggregation(ABC):
    """Combines the updates of a round's clients (``Phase.aggregation``).

    The algorithm must average parameters: what a client sends under a name is its new value of the server's tensor of
    that name.

    Attributes:
        poisson_sampling: whether every client joins a round by a draw of its own, so that the size of cohorts varies
            and may be 0; otherwise, all cohorts have one size.
        is_uniform: whether every client weighs 1, whatever the algorithm says; numbers of samples need not leave them.
        min_clients: how many updates it needs; a round that fewer clients answer is tried again.
        averages_changes: whether ``combine`` is the weighted mean of what clients send, and this the change of each
            tensor, so that secure aggregation can hide single updates.
    """

    poisson_sampling: bool = False
    is_uniform: bool = False
    min_clients: int = 1
    averages_changes: bool = False

    def check(  # noqa: B027  (most aggregations take all tensors)
        self, shared: Tree, parameters: set[str], cohort: Cohort
    ) -> None:
        """Refuses what it cannot aggregate, before any training; nothing by default.

        Args:
            shared: the server's tensors that clients send.
            parameters: the names of those that are parameters; the others are buffers.
            cohort: the number of clients, at least ``min_clients``.

        Raises:
            MisconfigurationException: if the tensors or the clients do not fit.
        """

    def begin(self) -> Tree:
        """Its state before the first round, whose names start with ``PREFIX``; none by default."""
        return {}

    def for_clients(self, state: Tree) -> Tree:
        """The part of its state that every client of a round receives; none by default.

        Args:
            state: its state before the round.
        """
        return {}

    @abstractmethod
    def of_client(self, client: Client, update: Update) -> Update:
        """What a client sends in place of the algorithm's update.

        Args:
            client: the client after its training; ``loaded`` has what it received.
            update: the algorithm's update.
        """

    def of_remote_client(self, client_id: int, update: Update) -> Update:
        """What to combine of a client on another machine, which sent ``update``; by default just that.

        Raises:
            ValueError: if the client cannot have made it.
        """
        return update

    @abstractmethod
    def combine(self, a: Update, b: Update) -> Update:
        """Folds two updates into one; associative and commutative, as ``Algorithm.combine`` is."""

    @abstractmethod
    def aggregate(
        self, start: Tree, combined: Update | None, state: Tree, cohort: Cohort, generator: Generator
    ) -> tuple[Update, Tree]:
        """The update for ``Algorithm.server_update``, and the aggregation's next state.

        Args:
            start: the server's tensors that clients send, as they were before the round.
            combined: the folded updates; None if nobody was in the cohort.
            state: its state before the round.
            cohort: the number of clients.
            generator: random numbers of this round of the phase, for the aggregation only.
        """
