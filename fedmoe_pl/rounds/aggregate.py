"""The step of the server in a round: a phase's aggregation, what it costs in privacy, and a server optimizer."""

from __future__ import annotations

import math
import zlib

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import OptimizerCallable
from lightning.pytorch.utilities import rank_zero_info
from torch import nn

from fedmoe_pl.aggregation import DifferentialPrivacy
from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends import one_thread
from fedmoe_pl.backends.optimizers import load_optimizer_state, optimizer_state, with_strides_of
from fedmoe_pl.checkpoints.phase_state import NOT_PRIVATE, PhaseState
from fedmoe_pl.phases.cohort import cohort_of
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import Run
from fedmoe_pl.seeds import generator_of
from fedmoe_pl.trees import Tree

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
    generator = generator_of(run.seed, _NOISE, zlib.crc32(phase.name.encode()), state.round)
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
