"""Evaluates a phase after some of its rounds; the monitored metric selects the best round and may end the phase."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from lightning.pytorch.callbacks import Checkpoint

from fedmoe_pl.backends import LocalTraining, Plan, one_thread
from fedmoe_pl.backends.client_loggers import SilentLogger
from fedmoe_pl.backends.fitting import listed
from fedmoe_pl.backends.traffic import Traffic
from fedmoe_pl.checkpoints.phase_state import WAYS, PhaseState
from fedmoe_pl.evaluation.client_models import evaluated_model
from fedmoe_pl.evaluation.metrics import lower_is_better
from fedmoe_pl.evaluation.results import Evaluation
from fedmoe_pl.logs.summary import evaluation_row
from fedmoe_pl.phases.participation import cohort_of
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import Run


def evaluate_phase(
    run: Run, phase: Phase, training: LocalTraining, plan: Plan | None = None, state: PhaseState | None = None
) -> list[Evaluation]:
    """Evaluates the model that each client would use now, once for each of ``Phase.evaluation_points``."""
    state = run.states[phase.name] if state is None else state
    arguments = training, state.server, state.clients, state.round_of_models
    round, selection = _round_and_selection(phase, state)
    with one_thread():
        of_points = run.evaluate(*arguments, phase.evaluation_points, run.evaluated, plan)
    return [
        Evaluation(
            method=phase.method(evaluation_point),
            round=round,
            model=evaluated_model(training.module, phase.algorithm),
            evaluation_point=f"after {evaluation_point.replace('_', ' ')}",
            selection=selection,
            clients=clients,
            drawn_from=None if run.evaluation_cohort_size is None else run.datamodule.num_clients,
            lower_is_better=lower_is_better(run.metrics),
            epochs=None if phase.evaluation.every_n_epochs is None else phase.epochs(run.trainer),
        )
        for evaluation_point, clients in zip(phase.evaluation_points, of_points, strict=True)
    ]


def _round_and_selection(phase: Phase, state: PhaseState) -> tuple[int, str]:
    """The round that is evaluated now, and the reason for its selection, in the words of ``Evaluation.selection``."""
    if state.given_round is not None:
        return state.given_round, "given checkpoint"
    if state.finished and state.best_round:
        return state.best_round, f"best round by {phase.monitor}"
    last = state.finished or state.stopped or state.round == phase.rounds
    return state.round, "last round" if last else "this round"


def evaluate_round(run: Run, phase: Phase, training: LocalTraining, plan: Plan | None) -> list[Evaluation]:
    """Evaluates the round as :func:`evaluate_phase` does, adds its rows, and remembers it if it is the best so far."""
    state = run.states[phase.name]
    evaluations = evaluate_phase(run, phase, training, plan)
    recorded = {(row["method"], row["round"]) for row in run.rows[-len(evaluations) :]}
    for evaluation in evaluations:
        if (evaluation.method, evaluation.round) not in recorded:  # a resumed run may repeat a round
            run.rows.append(evaluation_row(evaluation) | state.costs() | _costs_before(run, phase))
    select = phase.select
    if select is not None and state.round >= select.from_round:
        participants = cohort_of(phase, run.datamodule.num_clients, run.seed).participants
        mean = evaluations[0].spread_or_nan(select.monitor, set(participants)).mean
        state.remember_best(-mean if select.monitor in evaluations[0].lower_is_better else mean, select.min_delta)
    for evaluation in evaluations:
        run.call("on_evaluation_end", phase, evaluation)
    return evaluations


def _costs_before(run: Run, phase: Phase) -> dict[str, float]:
    """The costs of the phases that a phase starts from, by column of ``rounds.csv``; NaN if a result was given."""
    states = [run.states[before.name] for before in run.phases_before(phase)]
    costs: dict[str, float] = {"rounds_before": sum(state.round for state in states)}
    for quantity in Traffic._fields:
        costs[f"{quantity}_before"] = sum(state.traffic[f"{quantity}_{way}"] for state in states for way in WAYS)
    costs["flops_before"] = sum(state.flops for state in states)
    is_known = all(state.given_round is None for state in (*states, run.states[phase.name]))
    return costs if is_known else dict.fromkeys(costs, math.nan)


def is_evaluated_after(run: Run, phase: Phase, round: int) -> bool:
    """Whether the phase is evaluated after this many completed rounds."""
    every = _interval(run, phase)
    return bool(phase.evaluate and every and (round % every == 0 or round == phase.rounds))


def is_over(run: Run, phase: Phase, training: LocalTraining) -> bool:
    """Whether the phase ends early: because its monitor or algorithm says so, or more rounds would change nothing."""
    state = run.states[phase.name]
    waited = state.round - state.improved_round if state.improved_round else 0
    patience = phase.select and phase.select.patience
    if patience is not None and waited >= patience * _interval(run, phase):
        return True
    if not state.server_learns:
        return not state.clients and all(first < state.round for first, _ in training.trainable.values())
    return phase.algorithm.server_final(state.server, is_last=False) is not None


def _interval(run: Run, phase: Phase) -> int:
    """The number of rounds between two evaluations of the phase; 0 if it is evaluated only at its end."""
    state = run.states.get(phase.name)
    if state is not None and not state.server_learns:  # all evaluations would be of the given round
        return 0
    every = phase.evaluation.every_n_rounds
    return run.evaluate_every_n_rounds if every is None else every


def evaluate_epochs(run: Run, phase: Phase, plan: Plan, clients: Sequence[int]) -> None:
    """Before the only round of a phase, passes an evaluation after 0, n, 2n ... epochs to the callbacks.

    For each, the round's clients train from the start and stop after this many epochs, with schedules over all of the
    phase's. The trained weights are discarded, without logs, checkpoints or profiles; the result does not depend on
    them.
    """
    assert phase.evaluation.every_n_epochs is not None, "the caller has asked"
    state = run.states[phase.name]
    given = plan.training.trainer
    without_files = {
        "logger": SilentLogger() if given.get("logger") else False,
        "callbacks": [each for each in listed(given, "callbacks") if not isinstance(each, Checkpoint)],
        "enable_checkpointing": False,
        "profiler": None,
    }
    for epochs in range(0, phase.epochs(run.trainer), phase.evaluation.every_n_epochs):
        trainer = given | without_files
        if not epochs:  # clients can stop only at the end of an epoch
            trainer["max_epochs"] = 0
        shorter = plan.begin(replace(plan.training, trainer=trainer, stop_after=epochs))
        kept = {client: state.clients[client] for client in run.evaluated if client in state.clients}
        groups = shorter.groups(sorted({*clients} & {*run.evaluated}))
        for group in shorter.train(state.server, groups, state.clients, state.round) if groups else ():
            kept |= group.clients
        trained = replace(state, clients={client: tree for client, tree in kept.items() if tree}, round=1)
        for evaluation in evaluate_phase(run, phase, shorter.training, shorter, trained):
            run.call("on_evaluation_end", phase, replace(evaluation, selection="fewer epochs", epochs=epochs))
