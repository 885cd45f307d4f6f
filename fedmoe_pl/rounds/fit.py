"""Phases, their rounds, and the steps of a round: clients train, and the server aggregates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from fedmoe_pl.aggregation import DifferentialPrivacy
from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends import (
    LocalTraining,
    NotFiniteError,
    Plan,
    check_finite,
    one_thread,
)
from fedmoe_pl.backends.backend import updated_server
from fedmoe_pl.backends.optimizers import load_optimizer_state, optimizer_state, with_strides_of
from fedmoe_pl.backends.traffic import Traffic, TransferLog
from fedmoe_pl.checkpoints.client_state import EXCHANGED, readable
from fedmoe_pl.checkpoints.phase_state import NOT_PRIVATE, PhaseState
from fedmoe_pl.evaluation.evaluation import Evaluation
from fedmoe_pl.evaluation.flops import FlopCounter
from fedmoe_pl.phases.participation import ClientError, cohort_of
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.begin import first_clients, freeze_shared, share_memory
from fedmoe_pl.rounds.evaluate import evaluate_epochs, evaluate_phase, evaluate_round, is_evaluated_after, is_over
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.rounds.sample_privacy import count_steps, log_sample_epsilon, update_sample_epsilon
from fedmoe_pl.rounds.train import Trained, announce_round, draw_cohort, train_round
from fedmoe_pl.seeds import generator_of
from fedmoe_pl.trees import Tree, of_module


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
    update_sample_epsilon(phase, state)
    training = run.local_training(phase, module, state.initial)
    evaluations: list[Evaluation] = []
    plan: Plan | None = None
    if state.round < phase.rounds:
        if state.round == 0 and state.server_learns:
            clients = first_clients(training, draw_cohort(run, phase, state), readable(state.clients))
            state.server = phase.algorithm.server_begin(state.server, clients)
        freeze_shared(training, state)
        share_memory(training, run.initial_model(phase))
        state.server = training.copies.known(state.server)
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
    log_sample_epsilon(run, phase, state, training)
    training.elsewhere.clear()


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
    count_steps(phase, state, plan.training, trained.asked)
    if state.server_learns:
        _update_server(run, phase, plan.training, trained)
        final = algorithm.server_final(state.server, is_last=state.round == phase.rounds)
        state.server = state.server if final is None else final
        _exchange(run, phase, plan, trained.failed, round, log)
    run.progress.end_round()
    run.call("on_server_update", phase, round)
    # with a selection, its evaluation says so
    state.stopped = phase.select is None and is_over(run, phase, state, plan.training)
    evaluations: list[Evaluation] = []
    if is_evaluated_after(run, phase, state.round):
        if cohort is None:
            announce_round(run, phase, plan)
        evaluations = evaluate_round(run, phase, plan.training, plan)
    state.stopped = is_over(run, phase, state, plan.training)
    plan.training.copies.check(algorithm)
    if log.transfers:
        run.call("on_transfers", phase, round, log.transfers)
    run.save()
    run.store.remove_replaced(state.clients, state.best_clients)
    run.call("on_round_end", phase, round)
    return evaluations


def _update_server(run: Run, phase: Phase, training: LocalTraining, trained: Trained) -> None:
    """Makes the server's next state from the clients' updates; a server optimizer takes the step from the old one."""
    state, combined, secure = run.states[phase.name], trained.update, training.secure_aggregation
    if secure is not None and combined is not None:
        combined = secure.decoded(combined, state.server, training.start_of_changes(state.server))
    if phase.aggregation is not None:
        combined = aggregated(run, phase, combined)
    assert combined is not None, "only cohorts of an aggregation may be empty"
    with one_thread():  # a sum or a decomposition with several threads may have other bits
        new = updated_server(phase.algorithm, state.server, combined)
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
    state, written = run.states[phase.name], dict[int, Any]()
    for client, client_state, sent, received in plan.exchange(state.server, state.clients, failed, round):
        written.update(run.store.write(phase.name, EXCHANGED + round + 1, {client: client_state}))
        state.add_traffic("down", Traffic.of(sent))
        state.add_traffic("between_clients", Traffic.of(received))
        log.add("down", client, sent)
        log.add("between_clients", client, received)
    if written:
        state.clients = run.store.updated(phase.name, state.clients, written)


_NOISE = 9  # separates the random numbers of aggregations from those of clients, cohorts and splits


def shared_by(algorithm: Algorithm, server: Tree) -> Tree:
    """The server's tensors that clients send."""
    return {name: tensor for name, tensor in server.items() if algorithm.is_shared(name)}


def aggregated(run: Run, phase: Phase, combined: Update | None) -> Update:
    """The update for ``Algorithm.server_update``; changes the state of the phase's aggregation."""
    state, aggregation = run.states[phase.name], phase.aggregation
    assert aggregation is not None
    cohort = cohort_of(phase, run.datamodule.num_clients, run.seed)
    # two phases draw different noise, or the difference of their results would tell what it hides
    generator = generator_of(run.seed, _NOISE, phase.name, state.round)
    start = shared_by(phase.algorithm, state.server)
    with one_thread():
        update, state.aggregation = aggregation.aggregate(start, combined, state.aggregation, cohort, generator)
    return update


def server_step(
    factory: OptimizerCallable, module: LightningModule, old: Tree, new: Tree, state: Tree
) -> tuple[Tree, Tree]:
    """A step of an optimizer from the old parameters, using old - new as the gradient.

    FedOpt, Reddi et al., ICLR 2021, Algorithm 1 (https://arxiv.org/abs/2003.00295).

    Buffers, such as the statistics of batch normalization, and the algorithm's own tensors are taken from ``new``. So
    are parameters that no client changed: as a parameter without a gradient, they and their state stay as they are.
    """
    parameters = {name: nn.Parameter(old[name].clone()) for name in server_parameters(module, old)}
    optimizer = factory([*parameters.values()])
    if state:
        load_optimizer_state(parameters.items(), optimizer, state)
    changed = [name for name in parameters if not torch.equal(old[name], new[name])]
    for name in changed:
        parameters[name].grad = with_strides_of(old[name], old[name] - new[name])
    with one_thread():
        optimizer.step()
    stepped = {name: parameters[name].detach() for name in changed}
    return {**new, **stepped}, optimizer_state(parameters.items(), optimizer)


def server_parameters(module: LightningModule, server: Tree) -> list[str]:
    """Names of the module's floating-point parameters that the server holds, also of those that two parts share."""
    named = module.named_parameters(remove_duplicate=False)
    return [name for name, parameter in named if name in server and parameter.is_floating_point()]


def count_round(run: Run, phase: Phase) -> None:
    """Adds a round of a federated phase to those that its epsilon is computed of, and computes it."""
    state, aggregation = run.states[phase.name], phase.aggregation
    kind = NOT_PRIVATE
    if isinstance(aggregation, DifferentialPrivacy):
        cohort = cohort_of(phase, run.datamodule.num_clients, run.seed)
        kind = [aggregation.probability(cohort), aggregation.noise_multiplier]
    elif not math.isnan(state.epsilon):  # its earlier rounds were private, with another configuration
        state.epsilon = math.inf
    *before, last = state.counted_rounds.get(phase.name) or [[*kind, 0]]
    same = last[:2] == kind
    rounds = [*before, [*kind, last[2] + 1]] if same else [*before, last, [*kind, 1]]
    state.counted_rounds = {**state.counted_rounds, phase.name: rounds}
    update_epsilon(phase, state)


def update_epsilon(phase: Phase, state: PhaseState) -> None:
    """Computes the epsilon of all rounds for the phase's delta; without privacy, a given result keeps what it had."""
    if isinstance(phase.aggregation, DifferentialPrivacy):
        rounds = [kind for of_phase in state.counted_rounds.values() for kind in of_phase]
        state.epsilon, state.delta = phase.aggregation.epsilon(rounds), phase.aggregation.delta


def log_epsilon(phase: Phase, state: PhaseState) -> None:
    """Logs what a phase with differential privacy cost."""
    if math.isnan(state.epsilon):
        return
    what = f"(epsilon, delta)-differential privacy for each client with epsilon {state.epsilon:.3g} and delta "
    what += f"{state.delta:.3g}"
    if math.isinf(state.epsilon):
        what = "no differential privacy (epsilon is infinite), because rounds without noise are in it"
    rank_zero_info(f"{phase}: the server's model has {what}.")
