"""The state of a phase."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedmoe_pl.backends.traffic import Traffic
from fedmoe_pl.evaluation.results import Evaluation
from fedmoe_pl.trees import Tree

WAYS = ("down", "up", "between_clients")
"""Directions of traffic: from the server to clients, from clients to the server, and between clients."""
NOT_PRIVATE = [1.0, 0.0]
"""A round or step that every client or sample joins, without noise: epsilon is infinite."""
EVERYONE = "everyone"
"""Key in place of a client's id, for steps that count for all clients."""


def no_traffic() -> dict[str, int]:
    """Zero parameters and bytes in every direction, by column of ``rounds.csv``."""
    return {f"{quantity}_{way}": 0 for way in WAYS for quantity in Traffic._fields}


def with_kind(counted: list[list[float]] | None, kind: list[float], number: float) -> list[list[float]]:
    """The rounds or steps counted so far, and a number of them of one kind; neighbours of a kind are one entry."""
    *before, last = counted or [[*kind, 0]]
    if last[:2] == kind:
        return [*before, [*kind, last[2] + number]]
    return [*before, last, [*kind, number]]


@dataclass
class PhaseState:
    """The state of a phase; its tensors are never changed in place, so that states may share them.

    Attributes:
        initial: tensors of the phase's module before the first round, by name.
        server: the server's state.
        clients: the tensors that clients keep, by client, in memory or on disk.
        round: number of completed rounds.
        trained: the clients that have trained alone in a round that is not complete, by id as text: each one's file, as
            the store refers to it, the file's metadata, and what its Trainer logged. The rest of the state is that
            before the round.
        curve: the ``Evaluate.every_n_epochs`` with which the phase was evaluated before its only round; None if not.
        finished: whether the phase's result is final.
        best_metric: best mean of the monitored metric so far; negated if lower is better.
        improved_metric: the mean at the last improvement by more than ``Select.min_delta``.
        improved_round: the round of that improvement.
        stopped: whether the phase ended before its last round.
        best_round: the round of ``best_metric``, counted from 1; 0 if there is none.
        best_server: the server's state after that round.
        best_clients: the clients' states after that round.
        given_round: the round of a result that comes from another checkpoint (0: unknown), in which case the server's
            state stays as it is, even if clients train. None if the phase's own rounds make its result.
        evaluations: the final evaluations, one for each of ``Phase.evaluation_points``; none before the end.
        traffic: what was sent so far: ``parameters`` and ``bytes``, each with ``_down`` (from the server to clients),
            ``_up`` (from clients to the server) and ``_between_clients``.
        flops: floating-point operations of local training so far (``flops.FlopCounter``); NaN if not countable.
        failed: how many clients failed or dropped out so far, counted once per try.
        server_optimizer: the state of the phase's server optimizer, as ``backends.optimizers.optimizer_state`` returns
            it. It is not sent to clients, and no other phase starts from it.
        aggregation: the state of the phase's aggregation, such as an adapted clipping norm.
        counted_rounds: the rounds of each federated phase whose training is in the server's state, by phase name: for
            every kind of round, the probability with which clients joined it, the noise multiplier, and the number of
            such rounds. ``NOT_PRIVATE`` is the kind without differential privacy. Phases of another run have the path
            of its checkpoint before their names.
        epsilon: the epsilon of all these rounds; NaN for a phase without differential privacy.
        delta: the delta of ``epsilon``.
        counted_steps: the DP-SGD steps of each phase whose training is in a client's model, by phase name and client id
            as text: for every kind of step, the probability with which samples joined it, the noise multiplier, and the
            number of such steps. Phases and clients of another run have the path of its checkpoint before their names
            and ids. ``EVERYONE`` maps to ``NOT_PRIVATE`` if there were rounds without DP-SGD.
        sample_epsilon: the largest epsilon that these steps cost a client; NaN for phases without DP-SGD.
        sample_delta: the delta of ``sample_epsilon``.
    """

    initial: Tree
    server: Tree
    clients: Mapping[int, Tree] = field(default_factory=dict)
    round: int = 0
    trained: dict[str, tuple[list[int], Any, list[dict[str, float]]]] = field(default_factory=dict)
    curve: int | None = None
    finished: bool = False
    best_metric: float | None = None
    improved_metric: float | None = None
    improved_round: int = 0
    stopped: bool = False
    best_round: int = 0
    best_server: Tree = field(default_factory=dict)
    best_clients: Mapping[int, Tree] = field(default_factory=dict)
    given_round: int | None = None
    evaluations: list[Evaluation] = field(default_factory=list)
    traffic: dict[str, int] = field(default_factory=no_traffic)
    flops: float = 0
    failed: int = 0
    server_optimizer: Tree = field(default_factory=dict)
    aggregation: Tree = field(default_factory=dict)
    counted_rounds: dict[str, list[list[float]]] = field(default_factory=dict)
    epsilon: float = math.nan
    delta: float = math.nan
    counted_steps: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict)
    sample_epsilon: float = math.nan
    sample_delta: float = math.nan

    @property
    def server_learns(self) -> bool:
        """Whether rounds change the server's state; False if the phase's result comes from a checkpoint."""
        return self.given_round is None

    @property
    def round_of_models(self) -> int:
        """The number of rounds after which clients had this state's models: at the end, that of the selected round."""
        return self.best_round if self.finished and self.best_round else self.round

    def remember_best(self, metric: float, min_delta: float = 0.0) -> None:
        """Remembers this round if its metric is the best so far."""
        if math.isnan(metric):
            return  # no value would exceed NaN as the best metric
        if self.improved_metric is None or metric > self.improved_metric + min_delta:
            self.improved_metric, self.improved_round = metric, self.round
        if self.best_metric is None or metric > self.best_metric:
            self.best_metric, self.best_round = metric, self.round
            self.best_server, self.best_clients = self.server, self.clients

    def select_best(self) -> None:
        """Restores the state after the best round and drops that of the last round."""
        self.server, self.clients, self.best_server, self.best_clients = self.best_server, self.best_clients, {}, {}
        self.server_optimizer = {}

    def add_traffic(self, way: str, traffic: Traffic) -> None:
        """Adds what was sent in one direction: ``down``, ``up`` or ``between_clients``."""
        for quantity, value in traffic._asdict().items():
            self.traffic[f"{quantity}_{way}"] += value

    def costs(self) -> dict[str, float]:
        """Traffic, operations, privacy and failures so far, by column of ``rounds.csv``."""
        of_samples = {"sample_epsilon": self.sample_epsilon, "sample_delta": self.sample_delta}
        privacy = {"epsilon": self.epsilon, "delta": self.delta, **of_samples}
        return {**self.traffic, "flops": self.flops, **privacy, "failed": self.failed}
