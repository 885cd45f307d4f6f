"""The loop of a federation: phases, their rounds, and the steps of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lightning.pytorch import LightningModule

from fedmoe_pl.algorithms.algorithm import Algorithm, overrides
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends import LocalTraining, Plan, one_thread, step_after_aggregation, with_training_state
from fedmoe_pl.backends.traffic import Traffic, Transfer, TransferLog, transfers
from fedmoe_pl.rounds.aggregation_step import aggregated, log_epsilon
from fedmoe_pl.rounds.begin import first_clients
from fedmoe_pl.rounds.checkpoint import FILE, save_finished
from fedmoe_pl.rounds.cohort import phase_cohort
from fedmoe_pl.rounds.evaluation import Evaluation
from fedmoe_pl.rounds.flops import FlopCounter
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.results import round_row
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.rounds.server_step import server_step
from fedmoe_pl.rounds.state import PhaseState

# added to the round in the names of files that are written after an exchange, or after clients' own steps
_EXCHANGED, _STEPPED = 10**9, 2 * 10**9


def fit(run: Run) -> None:
    """Runs all phases that are not finished."""
    run.call("on_fit_start")
    for phase in run.phases:
        if phase.name not in run.states or not run.states[phase.name].finished:
            run_phase(run, phase)
    run.save()  # so that the checkpoint before the last one is of the finished run, too
    run.store.remove_replaced()
    run.call("on_fit_end")


def run_phase(run: Run, phase: Phase) -> None:
    """Runs the remaining rounds of a phase and determines its result."""
    module = run.module(phase)
    state = run.state_of(phase, module)
    training = run.local_training(phase, module, state.initial)
    evaluations: list[Evaluation] = []
    plan: Plan | None = None
    if state.round < phase.rounds:
        if state.round == 0 and state.server_learns:
            clients = first_clients(training, draw_cohort(run, phase, state), state.kept)
            state.server = phase.algorithm.server_begin(state.server, clients)
        plan, counter = run.plans.pop(phase.name).begin(training), FlopCounter(training)
        while state.round < phase.rounds and not state.stopped:
            evaluations = run_round(run, phase, plan, counter)
    if phase.evaluate and not evaluations:  # the last round was not evaluated, or was run before a resume
        evaluations = _evaluate_round(run, phase, training, plan)
    state.finished = True
    if state.best_round:
        state.select_best()
        evaluations = run.evaluate(phase, training, plan)
    state.evaluations = evaluations
    # before the checkpoint: after a kill in between, it is called again
    run.call("on_phase_end", phase, evaluations[0] if evaluations else None)
    if run.enable_checkpointing:
        save_finished(run.folder / FILE, phase.name, state)
    run.save()
    run.store.remove_rest(phase.name, state.kept)
    log_epsilon(phase, state)


def run_round(
    run: Run, phase: Phase, plan: Plan, counter: FlopCounter | None, cohort: Sequence[int] | None = None
) -> list[Evaluation]:
    """Runs one round; returns its evaluations, one for each of ``Phase.moments``, if it is evaluated.

    Args:
        run: the run.
        phase: a phase that has begun.
        plan: how its clients are trained.
        counter: counts the operations of their training; None counts none.
        cohort: ids of its clients; None draws them.
    """
    state, algorithm = run.states[phase.name], phase.algorithm
    round = state.round
    run.call("on_round_start", phase, round)
    cohort = draw_cohort(run, phase, state) if cohort is None else cohort
    log = TransferLog(run.records_transfers)
    asked, down = _asked_and_sent(algorithm, state, cohort, log)
    with one_thread():
        operations = counter.of_round(state.server, cohort, state.kept, round) if counter else 0
    combined, kept, up, sent = _train(run, phase, plan, cohort)
    state.round, state.kept, state.flops = round + 1, kept, state.flops + operations
    state.add_traffic("up", asked)
    state.add_traffic("down", down)
    if state.server_learns:
        _update_server(run, phase, plan.training.module, combined)
        if state.round == phase.rounds or algorithm.is_over(state.server):
            state.server = algorithm.server_final(state.server)
        state.add_traffic("up", up)
        log.transfers += sent
    _after_aggregation(run, phase, plan.training, cohort, round, log)
    if state.server_learns:
        state.add_traffic("between_clients", _exchange(run, phase, plan.training, round, log))
    run.progress.end_round()
    evaluates = run.evaluates_after(phase, state.round)
    evaluations = _evaluate_round(run, phase, plan.training, plan) if evaluates else []
    state.stopped = _is_over(run, phase, state)
    if log.transfers:
        run.call("on_transfers", phase, round, log.transfers)
    run.save()
    run.store.remove_replaced(state.kept, state.best_kept)
    run.call("on_round_end", phase, round)
    return evaluations


def draw_cohort(run: Run, phase: Phase, state: PhaseState) -> list[int]:
    """The clients of the round; all clients if they only train the parameters that they keep."""
    num_clients = run.datamodule.num_clients
    if not state.server_learns:
        return [*range(num_clients)]
    return phase_cohort(phase, num_clients, run.seed, run.rounds_before(phase) + state.round)


def _asked_and_sent(
    algorithm: Algorithm, state: PhaseState, cohort: Sequence[int], log: TransferLog
) -> tuple[Traffic, Traffic]:
    """The clients' requests and what the server sends: nothing if clients train alone, a checkpoint's result once."""
    asked, sent = Traffic(), Traffic()
    if not algorithm.federated or (not state.server_learns and state.round > 0):
        return asked, sent
    asks = overrides(algorithm, "client_request")  # otherwise what clients keep, perhaps on disk, need not be read
    for client in cohort:
        request = algorithm.client_request(client, state.kept.get(client, {})) if asks else {}
        with one_thread():
            answer = algorithm.server_send(state.server, client, request)
        asked += Traffic.of(request)
        sent += Traffic.of(answer)
        log.add("requests", client, request)
        log.add("down", client, answer)
    return asked, sent


def _train(
    run: Run, phase: Phase, plan: Plan, cohort: Sequence[int]
) -> tuple[Update | None, Any, Traffic, list[Transfer]]:
    """Trains the clients of the round.

    Returns:
        Their combined update (None without clients), the tensors that all clients keep now, by client, and the traffic
        to the server. If a callback asks for them, also each of its tensors, and what the aggregation sent to clients.
    """
    state, round = run.states[phase.name], run.states[phase.name].round
    combined: Update | None = None
    written: dict[int, Any] = {}
    up, sent = Traffic(), list[Transfer]()
    aggregation = plan.training.aggregation
    combine = phase.algorithm.combine if aggregation is None else aggregation.combine
    added = {} if aggregation is None else aggregation.for_clients(state.aggregation)
    for client in cohort if added else ():
        state.add_traffic("down", Traffic.of(added))
        sent += transfers("down", client, added) if plan.training.record_transfers else []
    for group in plan.train({**state.server, **added}, cohort, state.kept, round) if cohort else ():
        with one_thread():
            combined = group.update if combined is None else combine(combined, group.update)
        written.update(run.store.write(phase.name, round + 1, group.kept))
        up += group.sent
        sent += group.transfers
        for client in group.kept:
            run.progress.add_client(phase, len(cohort))
            run.call("on_client_end", phase, round, client)
    return combined, run.store.updated(phase.name, state.kept, written), up, sent


def _update_server(run: Run, phase: Phase, module: LightningModule, combined: Update | None) -> None:
    """Makes the server's next state from the clients' updates; a server optimizer takes the step from the old one."""
    state = run.states[phase.name]
    if phase.aggregation is not None:
        combined = aggregated(run, phase, combined)
    assert combined is not None, "only cohorts of an aggregation may be empty"
    with one_thread():  # a sum or a decomposition with several threads may have other bits
        new = phase.algorithm.server_update(state.server, combined)
    if phase.server_optimizer is not None:
        old, optimizer = state.server, state.server_optimizer
        new, state.server_optimizer = server_step(phase.server_optimizer, module, old, new, optimizer)
    state.server = new


def _after_aggregation(
    run: Run, phase: Phase, training: LocalTraining, cohort: Sequence[int], round: int, log: TransferLog
) -> None:
    """Lets the clients of the round take their step on the new server's state, which they receive for it."""
    if not overrides(phase.algorithm, "client_after_aggregation"):
        return
    state, written = run.states[phase.name], dict[int, Any]()
    asked, sent = _asked_and_sent(phase.algorithm, state, cohort, log)
    state.add_traffic("up", asked)
    state.add_traffic("down", sent)
    with one_thread():
        for client in cohort:
            kept = step_after_aggregation(training, state.server, client, state.kept, round)
            written.update(run.store.write(phase.name, _STEPPED + round + 1, {client: kept}))
    state.kept = run.store.updated(phase.name, state.kept, written)


def _exchange(run: Run, phase: Phase, training: LocalTraining, round: int, log: TransferLog) -> Traffic:
    """Lets clients send each other tensors, all computed from those they kept before; returns the traffic."""
    state, received, written = run.states[phase.name], Traffic(), dict[int, Any]()
    for client, kept, from_others in phase.algorithm.exchange(state.server, state.kept, round):
        if training.keep_optimizer or training.keep_trained:  # otherwise what clients keep need not be read again
            kept = with_training_state(kept, state.kept.get(client, {}))
        written.update(run.store.write(phase.name, _EXCHANGED + round + 1, {client: kept}))
        received += Traffic.of(from_others)
        log.add("between_clients", client, from_others)
    if written:
        state.kept = run.store.updated(phase.name, state.kept, written)
    return received


def _evaluate_round(run: Run, phase: Phase, training: LocalTraining, plan: Plan | None) -> list[Evaluation]:
    """Evaluates the round, adds its rows, and remembers it if it is the best so far."""
    state = run.states[phase.name]
    evaluations = run.evaluate(phase, training, plan)
    recorded = {(row["method"], row["round"]) for row in run.rows[-len(evaluations) :]}
    for evaluation in evaluations:
        if (evaluation.method, evaluation.round) not in recorded:  # a resumed run may repeat a round
            run.rows.append(round_row(evaluation) | state.costs())
    if phase.monitor and state.round >= phase.monitor_from_round:
        participants = phase.algorithm.participants(range(run.datamodule.num_clients), run.seed)
        mean = evaluations[0].spread(phase.monitor, set(participants)).mean
        state.remember_best(-mean if phase.monitor == "validation_loss" else mean, phase.min_delta)
    for evaluation in evaluations:
        run.call("on_evaluation_end", phase, evaluation)
    return evaluations


def _is_over(run: Run, phase: Phase, state: PhaseState) -> bool:
    """Whether the phase ends early: its monitor or algorithm says so, or more rounds would change nothing."""
    waited = state.round - state.improved_round if state.improved_round else 0
    if phase.patience is not None and waited >= phase.patience * run.evaluation_interval(phase):
        return True
    return phase.algorithm.is_over(state.server) if state.server_learns else not state.kept
