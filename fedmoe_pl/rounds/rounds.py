"""The loop of a federation: phases, their rounds, and the steps of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedmoe_pl.algorithms.algorithm import Algorithm, Update
from fedmoe_pl.backends import LocalTraining, Plan
from fedmoe_pl.backends.traffic import Traffic
from fedmoe_pl.rounds.begin import first_clients
from fedmoe_pl.rounds.checkpoint import FILE, save_finished
from fedmoe_pl.rounds.cohort import phase_cohort
from fedmoe_pl.rounds.evaluation import Evaluation
from fedmoe_pl.rounds.flops import FlopCounter
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.results import round_row
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.rounds.state import PhaseState

_EXCHANGED = 10**9  # added to the round in the names of files that are written after an exchange


def fit(run: Run) -> None:
    """Runs all phases that are not finished."""
    run.call("on_fit_start")
    for phase in run.phases:
        if phase.name not in run.states or not run.states[phase.name].finished:
            run_phase(run, phase)
    run.call("on_fit_end")


def run_phase(run: Run, phase: Phase) -> None:
    """Runs the remaining rounds of a phase and determines its result."""
    module = run.module(phase)
    state = run.state_of(phase, module)
    training = run.local_training(phase, module, state.initial)
    evaluation = None
    if state.round < phase.rounds:
        if state.round == 0 and state.server_learns:
            clients = first_clients(training, _cohort(run, phase, state), state.kept)
            state.server = phase.algorithm.server_begin(state.server, clients)
        plan, counter = run.plans.pop(phase.name).begin(training), FlopCounter(training)
        while state.round < phase.rounds and not state.stopped:
            evaluation = run_round(run, phase, plan, counter)
    if phase.evaluate and evaluation is None:  # the last round was not evaluated, or was run before a resume
        evaluation = _evaluate_round(run, phase, training)
    state.finished = True
    if state.best_round:
        state.select_best()
        evaluation = run.evaluate(phase, training)
    state.evaluation = evaluation
    run.call("on_phase_end", phase, evaluation)  # before the checkpoint: after a kill in between, it is called again
    if run.enable_checkpointing:
        save_finished(run.folder / FILE, phase.name, state)
    run.save()
    run.store.remove_rest(phase.name, state.kept)


def run_round(run: Run, phase: Phase, plan: Plan, counter: FlopCounter) -> Evaluation | None:
    """Runs one round; returns its evaluation, if it is evaluated.

    Args:
        run: the run.
        phase: a phase that has begun.
        plan: how its clients are trained.
        counter: counts the operations of their training.
    """
    state, algorithm = run.states[phase.name], phase.algorithm
    round = state.round
    run.call("on_round_start", phase, round)
    cohort = _cohort(run, phase, state)
    down = _sent_down(algorithm, state, cohort)
    operations = counter.of_round(state.server, cohort, state.kept, round)
    combined, kept, up = _train(run, phase, plan, cohort)
    state.round, state.kept, state.flops = round + 1, kept, state.flops + operations
    state.add_traffic("down", down)
    if state.server_learns:
        state.server = algorithm.server_update(state.server, combined)
        if state.round == phase.rounds or algorithm.is_over(state.server):
            state.server = algorithm.server_final(state.server)
        state.add_traffic("up", up)
        state.add_traffic("between_clients", _exchange(run, phase, state, round))
    run.progress.end_round()
    evaluation = _evaluate_round(run, phase, plan.training) if run.evaluates_after(phase, state.round) else None
    state.stopped = _is_over(run, phase, state)
    run.save()
    run.store.remove_replaced(state.kept, state.best_kept)
    run.call("on_round_end", phase, round)
    return evaluation


def _cohort(run: Run, phase: Phase, state: PhaseState) -> list[int]:
    """The clients of the round; all clients if they only train the parameters that they keep."""
    num_clients = run.datamodule.num_clients
    if not state.server_learns:
        return [*range(num_clients)]
    return phase_cohort(phase, num_clients, run.seed, run.rounds_before(phase) + state.round)


def _sent_down(algorithm: Algorithm, state: PhaseState, cohort: Sequence[int]) -> Traffic:
    """What the server sends in this round: a checkpoint's result only once, and nothing to clients that train alone."""
    if not algorithm.federated or (not state.server_learns and state.round > 0):
        return Traffic()
    return sum((Traffic.of(algorithm.server_send(state.server, client)) for client in cohort), Traffic())


def _train(run: Run, phase: Phase, plan: Plan, cohort: Sequence[int]) -> tuple[Update, Any, Traffic]:
    """Trains the clients of the round.

    Returns:
        Their combined update, the tensors that all clients keep now, by client, and the traffic to the server.
    """
    state, round = run.states[phase.name], run.states[phase.name].round
    combined: Update | None = None
    written: dict[int, Any] = {}
    up = Traffic()
    for group in plan.train(state.server, cohort, state.kept, round):
        combined = group.update if combined is None else phase.algorithm.combine(combined, group.update)
        written.update(run.store.write(phase.name, round + 1, group.kept))
        up += group.sent
        for client in group.kept:
            run.progress.add_client(phase, len(cohort))
            run.call("on_client_end", phase, round, client)
    assert combined is not None, "a cohort has at least one client"
    return combined, run.store.updated(phase.name, state.kept, written), up


def _exchange(run: Run, phase: Phase, state: PhaseState, round: int) -> Traffic:
    """Lets clients send each other tensors, all computed from those they kept before; returns the traffic."""
    received, written = Traffic(), dict[int, Any]()
    for client, kept, from_others in phase.algorithm.exchange(state.server, state.kept, round):
        written.update(run.store.write(phase.name, _EXCHANGED + round + 1, {client: kept}))
        received += Traffic.of(from_others)
    if written:
        state.kept = run.store.updated(phase.name, state.kept, written)
    return received


def _evaluate_round(run: Run, phase: Phase, training: LocalTraining) -> Evaluation:
    """Evaluates the round, adds its row, and remembers it if it is the best so far."""
    state = run.states[phase.name]
    evaluation = run.evaluate(phase, training)
    last = run.rows[-1] if run.rows else {"method": None, "round": None}
    if (evaluation.method, evaluation.round) != (last["method"], last["round"]):  # a resumed run may repeat a round
        run.rows.append(round_row(evaluation) | state.costs())
    if phase.monitor and state.round >= phase.monitor_from_round:
        participants = phase.algorithm.participants(range(run.datamodule.num_clients), run.seed)
        mean = evaluation.spread(phase.monitor, set(participants)).mean
        state.remember_best(-mean if phase.monitor == "validation_loss" else mean, phase.min_delta)
    run.call("on_evaluation_end", phase, evaluation)
    return evaluation


def _is_over(run: Run, phase: Phase, state: PhaseState) -> bool:
    """Whether the phase ends early: its monitor or algorithm says so, or more rounds would change nothing."""
    waited = state.round - state.improved_round if state.improved_round else 0
    if phase.patience is not None and waited >= phase.patience * run.evaluation_interval(phase):
        return True
    return phase.algorithm.is_over(state.server) if state.server_learns else not state.kept
