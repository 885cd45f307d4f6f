"""Trains the clients of a round, and tries again if too few of them answer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends import Failure, Plan, guarded, one_thread
from fedmoe_pl.backends.traffic import Traffic, TransferLog
from fedmoe_pl.checkpoints.client_state import readable
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.evaluation.flops import FlopCounter
from fedmoe_pl.phases.participation import RETRIES, client_error, phase_cohort
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.evaluate import is_over
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.trees import Tree


@dataclass(frozen=True)
class Trained:
    """The clients of a round after their training."""

    update: Update | None
    """The combined update of those that answered; None if there are none, which an aggregation may allow."""
    clients: list[int]
    """Those that answered."""
    failed: list[int]
    """Those that failed or dropped out."""
    client_states: Mapping[int, Tree]
    """What all clients keep now."""
    asked: set[int]
    """Those that began to train, also in tries whose result was discarded."""


def train_round(
    run: Run,
    phase: Phase,
    plan: Plan,
    counter: FlopCounter | None,
    log: TransferLog,
    cohort: Sequence[int] | None,
) -> Trained:
    """Trains the clients of the round; tries again if too few answer. What each try sends and computes counts."""
    state, failures, attempt = run.states[phase.name], run.failures, 0
    aggregation = plan.training.aggregation
    asked: set[int] = set()
    poisson = aggregation is not None and aggregation.poisson_sampling
    secure = plan.training.secure_aggregation
    needed, why = failures.needed(aggregation, secure)
    while True:
        drawn = draw_cohort(run, phase, state, attempt) if cohort is None else cohort
        dropped = _dropped(run, phase, drawn, attempt)
        clients = [client for client in drawn if client not in dropped]
        asked.update(clients)
        tried, added = TransferLog(log.active), _added(state, plan)
        down = _count_costs(phase, state, plan, clients, added, counter, tried)
        run.logged = {}
        combined, written, failed = _train_clients(run, phase, plan, clients, added, tried)
        _count_down(state, down, failed, tried, log)
        state.failed += len(dropped) + len(failed)
        failures.report(phase, state.round + 1, failed, run.datamodule.client_names)
        answered = [client for client in clients if client not in failed]
        expected = clients if poisson else drawn  # if it were drawn again, clients would not drop out independently
        if len(answered) >= (needed if secure else min(needed, len(expected))):
            client_states = run.store.updated(phase.name, state.clients, written)
            return Trained(combined, answered, [*dropped, *failed], client_states, asked)
        run.progress.end_round()
        reason = f"{phase}, round {state.round + 1}: {len(answered)} of {len(drawn)} clients answered, but {why}"
        is_of_code = len(failed) > 1 and len(failed) == len(clients) and _fail_alike([*failed.values()])
        if attempt == RETRIES or is_of_code:
            client, failure = min(failed.items(), key=lambda item: item[0], default=(0, None))
            example = f"; client {run.datamodule.client_names[client]}: {failure.reason}" if failure else ""
            tries = " and all failed alike" if is_of_code else f", also after {RETRIES} more tries"
            raise client_error(f"{reason}{tries}{example}", failure)
        rank_zero_warn(f"{reason}; the round is tried again.")
        plan.before_another_try()
        attempt += 1


def _fail_alike(failures: Sequence[Failure]) -> bool:
    """Whether all failed by the same exception, which another try would only raise again; a disk may recover."""
    return len({each.reason for each in failures}) == 1 and not isinstance(failures[0].error, OSError | None)


def announce_round(run: Run, phase: Phase, plan: Plan) -> None:
    """Announces to the plan the next round, if there will be one whatever its clients' evaluation says."""
    state = run.states[phase.name]
    if state.round == phase.rounds or is_over(run, phase, state, plan.training):
        return
    drawn = draw_cohort(run, phase, state)
    dropped = _dropped(run, phase, drawn)
    clients = [client for client in drawn if client not in dropped]
    plan.announce({**state.server, **_added(state, plan)}, clients, state.clients, state.round)


def _dropped(run: Run, phase: Phase, drawn: Sequence[int], attempt: int = 0) -> list[int]:
    """The clients of a cohort that drop out before their training."""
    round, aggregation = run.rounds_before(phase) + run.states[phase.name].round, phase.aggregation
    one_stays = aggregation is None or not aggregation.poisson_sampling
    return run.failures.dropped(drawn, run.seed, round, attempt, one_stays)


def _added(state: PhaseState, plan: Plan) -> Tree:
    """What the aggregation sends beside what the algorithm does."""
    return {} if plan.training.aggregation is None else plan.training.aggregation.for_clients(state.aggregation)


def draw_cohort(run: Run, phase: Phase, state: PhaseState, attempt: int = 0) -> list[int]:
    """The clients of the round; all clients if they only train the parameters that they keep."""
    num_clients = run.datamodule.num_clients
    if not state.server_learns:
        return [*range(num_clients)]
    return phase_cohort(phase, num_clients, run.seed, run.rounds_before(phase) + state.round, attempt)


def _count_costs(
    phase: Phase,
    state: PhaseState,
    plan: Plan,
    clients: Sequence[int],
    added: Tree,
    counter: FlopCounter | None,
    log: TransferLog,
) -> dict[int, Traffic]:
    """Counts requests and the operations of training; returns what each client is to be sent."""
    down = count_sent(phase.algorithm, state, plan, clients, log)
    for client in clients if added else ():
        down[client] = down.get(client, Traffic()) + Traffic.of(added)
        log.add("down", client, added)
    if counter is not None:  # it trains a client for a batch, which may never end
        count = partial(counter.of_round, state.server, clients, readable(state.clients), state.round)
        with one_thread():
            operations = guarded(count, plan.training.client_timeout)
        state.flops += math.nan if isinstance(operations, Failure) else operations
    return down


def _count_down(
    state: PhaseState, down: Mapping[int, Traffic], failed: Mapping[int, Failure], tried: TransferLog, log: TransferLog
) -> None:
    """Counts what was sent to clients, and adds it to the log; nothing was sent to one that is not connected."""
    absent = {client for client, failure in failed.items() if failure.is_absent}
    for client, traffic in down.items():
        if client not in absent:
            state.add_traffic("down", traffic)
    log.transfers += [each for each in tried.transfers if each.direction != "down" or each.client not in absent]


def count_sent(
    algorithm: Algorithm, state: PhaseState, plan: Plan, clients: Sequence[int], log: TransferLog
) -> dict[int, Traffic]:
    """Counts requests; returns what the server is to send: nothing if clients train alone, a checkpoint's result once.

    Both are in the log.
    """
    down: dict[int, Traffic] = {}
    if not algorithm.federated or (not state.server_learns and state.round > 0):
        return down
    requests = plan.requests(state.server, clients, state.clients, state.round)
    with one_thread():
        for client, request in requests.items():
            answer = algorithm.server_send(state.server, client, request)
            state.add_traffic("up", Traffic.of(request))
            down[client] = Traffic.of(answer)
            log.add("requests", client, request)
            log.add("down", client, answer)
    return down


def _train_clients(
    run: Run, phase: Phase, plan: Plan, clients: Sequence[int], added: Tree, log: TransferLog
) -> tuple[Update | None, dict[int, Any], dict[int, Failure]]:
    """Trains clients: their combined update, None if all failed, what the store has written, and why some failed."""
    state, failures = run.states[phase.name], run.failures
    combined: Update | None = None
    written: dict[int, Any] = {}
    failed: dict[int, Failure] = {}
    for group in plan.train({**state.server, **added}, clients, state.clients, state.round) if clients else ():
        failures.stop(phase, state.round + 1, group.failed, run.datamodule.client_names)
        if group.update is not None:
            with one_thread():
                combined = group.update if combined is None else plan.training.combining.combine(combined, group.update)
        written.update(run.store.write(phase.name, state.round + 1, group.clients))
        failed |= group.failed
        run.logged |= group.logged
        if state.server_learns:
            state.add_traffic("up", group.sent)
            log.transfers += group.transfers
        for client in (*group.clients, *group.failed):
            run.progress.add_client(phase, len(clients))
            if client not in group.failed:
                run.call("on_client_end", phase, state.round, client)
    return combined, written, failed
