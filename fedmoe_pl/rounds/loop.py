"""The loop of a federation: phases, their rounds, and the steps of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedmoe_pl.backends import (
    LocalTraining,
    NotFiniteError,
    Plan,
    check_finite,
    one_thread,
)
from fedmoe_pl.backends.traffic import Traffic, TransferLog
from fedmoe_pl.checkpoints.client_state import EXCHANGED, readable
from fedmoe_pl.evaluation.evaluation import Evaluation
from fedmoe_pl.evaluation.flops import FlopCounter
from fedmoe_pl.phases.failures import ClientError
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.aggregate import aggregated, count_round, log_epsilon, server_step, update_epsilon
from fedmoe_pl.rounds.begin import first_clients, freeze_shared
from fedmoe_pl.rounds.evaluate import evaluate_epochs, evaluate_phase, evaluate_round, is_evaluated_after, is_over
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.rounds.train import Trained, announce_round, draw_cohort, train_round
from fedmoe_pl.trees import of_module


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
    update_epsilon(phase, state)  # of a result from a checkpoint, or for another delta than before
    training = run.local_training(phase, module, state.initial)
    evaluations: list[Evaluation] = []
    plan: Plan | None = None
    if state.round < phase.rounds:
        if state.round == 0 and state.server_learns:
            clients = first_clients(training, draw_cohort(run, phase, state), readable(state.clients))
            state.server = phase.algorithm.server_begin(state.server, clients)
        freeze_shared(training, state)
        plan, counter = run.plans.pop(phase.name).begin(training), FlopCounter(training)
        if phase.evaluation.every_n_epochs is not None and state.server_learns:
            evaluate_epochs(run, phase, plan)
        while state.round < phase.rounds and not state.stopped:
            evaluations = run_round(run, phase, plan, counter)
    if phase.evaluate and not evaluations:  # the last round was not evaluated, or was run before a resume
        evaluations = evaluate_round(run, phase, training, plan)
    state.finished = True
    if state.best_round:
        state.select_best()
        evaluations = evaluate_phase(run, phase, training, plan)
    state.evaluations = evaluations
    # before the checkpoint: after a kill in between, it is called again
    run.call("on_phase_end", phase, evaluations[0] if evaluations else None)
    for evaluation_point in phase.evaluation_points:
        run.loggers.close(phase.method(evaluation_point))
    run.save(finished=phase.name)
    run.store.remove_rest(phase.name, state.clients)
    log_epsilon(phase, state)


def run_round(
    run: Run, phase: Phase, plan: Plan, counter: FlopCounter | None, cohort: Sequence[int] | None = None
) -> list[Evaluation]:
    """Runs one round; returns its evaluations, one for each of ``Phase.evaluation_points``, if it is evaluated."""
    state, algorithm = run.states[phase.name], phase.algorithm
    round = state.round
    run.call("on_round_start", phase, round)
    log = TransferLog(run.records_transfers)
    trained = train_round(run, phase, plan, counter, log, cohort)
    state.round, state.clients = round + 1, trained.client_states
    if state.server_learns:
        _update_server(run, phase, plan.training, trained)
        final = algorithm.server_final(state.server, is_last=state.round == phase.rounds)
        state.server = state.server if final is None else final
        _exchange(run, phase, plan, trained.failed, round, log)
    run.progress.end_round()
    run.call("on_server_update", phase, round)
    evaluations: list[Evaluation] = []
    if is_evaluated_after(run, phase, state.round):
        if cohort is None:
            announce_round(run, phase, plan)
        evaluations = evaluate_round(run, phase, plan.training, plan)
    state.stopped = is_over(run, phase, state)
    if log.transfers:
        run.call("on_transfers", phase, round, log.transfers)
    run.save()
    run.store.remove_replaced(state.clients, state.best_clients)
    run.call("on_round_end", phase, round)
    return evaluations


def _update_server(run: Run, phase: Phase, training: LocalTraining, trained: Trained) -> None:
    """Makes the server's next state from the clients' updates; a server optimizer takes the step from the old one."""
    state, combined = run.states[phase.name], trained.update
    if phase.aggregation is not None:
        combined = aggregated(run, phase, combined)
    assert combined is not None, "only cohorts of an aggregation may be empty"
    with one_thread():  # a sum or a decomposition with several threads may have other bits
        new = phase.algorithm.server_update(state.server, combined)
    if phase.server_optimizer is not None:
        old, optimizer = state.server, state.server_optimizer
        new, state.server_optimizer = server_step(phase.server_optimizer, training.module, old, new, optimizer)
    try:
        check_finite([of_module(new)], 1, training.initial)
    except NotFiniteError as error:
        text = f"{phase}, round {state.round}: the server cannot go on: {error}, although all that clients sent is."
        raise ClientError(text) from error
    state.server = new
    if phase.algorithm.federated:
        count_round(run, phase)


def _exchange(run: Run, phase: Phase, plan: Plan, failed: Sequence[int], round: int, log: TransferLog) -> None:
    """Lets clients send each other tensors, all computed from those they kept before."""
    if phase.algorithm.exchange is None:
        return
    state, written = run.states[phase.name], dict[int, Any]()
    for client, client_state, sent, received in plan.exchange(state.server, state.clients, failed, round):
        written.update(run.store.write(phase.name, EXCHANGED + round + 1, {client: client_state}))
        state.add_traffic("down", Traffic.of(sent))
        state.add_traffic("between_clients", Traffic.of(received))
        log.add("down", client, sent)
        log.add("between_clients", client, received)
    if written:
        state.clients = run.store.updated(phase.name, state.clients, written)
