"""The epsilons of clients and of their samples after each round, and the noise that keeps those below a target."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cache
from statistics import fmean

from lightning.pytorch.utilities import rank_zero_info

from fedmoe_pl.aggregation import DifferentialPrivacy
from fedmoe_pl.aggregation.accountant import noise_for
from fedmoe_pl.backends import LocalTraining, client_of
from fedmoe_pl.checkpoints.phase_state import EVERYONE, NOT_PRIVATE, PhaseState, with_kind
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import poisson_sampling
from fedmoe_pl.phases.participation import cohort_of
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import Run

Steps = list[list[float]]
"""For each kind of step: the probability that a sample joins it, the noise multiplier, and the number of steps."""
_ROUNDING = 1e-9  # relative error of sums in different orders


def set_noise(run: Run) -> None:
    """Finds, before any training, each client's noise multiplier in phases with a ``target_epsilon``.

    The noise follows from the configuration alone, so that a resumed run has the same noise.
    """
    planned: dict[tuple[str, int], list[float]] = {}  # the steps of a round
    noise_of = cache(noise_for)
    for phase in run.phases:
        privacy, before = phase.sample_privacy, run.phases_before(phase)
        if privacy is None:
            continue
        training = run.local_training(phase, module := run.module(phase), dict(module.state_dict()))
        noise: dict[int, float] = {}
        for client in run.clients:
            probability, steps = _sampling(training, client)
            number, z = steps * training.max_epochs, privacy.noise_multiplier
            if z is None:
                assert privacy.target_epsilon is not None, "DPSGD has checked it"
                spent = tuple(tuple(in_rounds(planned[other.name, client], other.rounds)) for other in before)
                arguments = privacy.target_epsilon, privacy.delta, probability, number * phase.rounds, spent
                z = noise[client] = noise_of(*arguments)
            if math.isinf(z):
                because = f"client {client} spends more in the phases that this one starts from"
                value = privacy.target_epsilon
                raise InvalidArgumentError(str(phase), "sample_privacy.target_epsilon", value, "higher", because)
            planned[phase.name, client] = [probability, z, number]
        if privacy.noise_multiplier is None:
            run.noise_multipliers[phase.name] = noise
            _check_spent(run, phase, planned)


def _check_spent(run: Run, phase: Phase, planned: Mapping[tuple[str, int], list[float]]) -> None:
    """Refuses to resume a run if its rounds so far, planned with other settings, would lead beyond a target."""
    chain = [phase, *run.phases_before(phase)]
    states = {each.name: run.states[each.name] for each in chain if each.name in run.states}
    if not states or phase.ckpt_path is not None or (phase.name in states and states[phase.name].finished):
        return
    counted = {name: of_phase for state in states.values() for name, of_phase in state.counted_steps.items()}
    rounds = {each.name: each.rounds - (states[each.name].round if each.name in states else 0) for each in chain}
    for client in run.clients:
        left = [in_rounds(planned[name, client], number) for name, number in rounds.items()]
        check_target(phase, client, _steps_of(counted.values(), str(client)), left)


def check_target(phase: Phase, client: int, spent: Steps, left: Steps) -> None:
    """Refuses a client's remaining steps if they would exceed the target together with the steps already taken."""
    assert phase.sample_privacy is not None
    target = phase.sample_privacy.target_epsilon
    if target is None or (total := phase.sample_privacy.epsilon([*spent, *left])) <= target * (1 + _ROUNDING):
        return
    allowed = "higher, or rounds, epochs and batch size left as they were when the noise was chosen"
    so_far = f"client {client} has spent {phase.sample_privacy.epsilon(spent):.3g} so far"
    because = f"{so_far}, and would come to {total:.3g} after round {phase.rounds}"
    if math.isinf(total):
        allowed = "left out, with a noise_multiplier in its place"
        because = f"client {client} has taken steps without noise"
    raise InvalidArgumentError(str(phase), "sample_privacy.target_epsilon", target, allowed, because)


def in_rounds(steps_of_round: Sequence[float], rounds: int) -> list[float]:
    """The steps of a number of equal rounds."""
    probability, noise_multiplier, number = steps_of_round
    return [probability, noise_multiplier, number * rounds]


def _sampling(training: LocalTraining, client: int) -> tuple[float, int]:
    """The probability with which a client's sample joins a batch, and the number of batches in an epoch."""
    training = training.of(client)
    samples = training.algorithm.client_samples(client_of(training, training.module, client, {}, round=0))
    return poisson_sampling(len(samples), training.batch_size or training.datamodule.batch_size)


def steps_of_round(training: LocalTraining, client: int) -> list[float]:
    """A client's steps in a round: the probability of a sample, the noise multiplier, and the number of steps."""
    probability, steps = _sampling(training, client)
    return [probability, training.noise_multiplier(client), steps * training.max_epochs]


def count_round(run: Run, phase: Phase) -> None:
    """Adds a round to those that count for the epsilon of a federated phase."""
    state, aggregation = run.states[phase.name], phase.aggregation
    kind = NOT_PRIVATE
    if isinstance(aggregation, DifferentialPrivacy):
        cohort = cohort_of(phase, run.datamodule.num_clients, run.seed)
        kind = [aggregation.probability(cohort), aggregation.noise_multiplier]
    elif not math.isnan(state.epsilon):  # earlier rounds were private, under another configuration
        state.epsilon = math.inf
    rounds = with_kind(state.counted_rounds.get(phase.name), kind, 1)
    state.counted_rounds = {**state.counted_rounds, phase.name: rounds}


def count_steps(phase: Phase, state: PhaseState, training: LocalTraining, clients: Collection[int]) -> None:
    """Adds a round's steps of the clients that were asked to train, whether they answered or not.

    A round without noise counts for all clients, even if it trained only what they keep: later rounds start from that.
    """
    counted = {**state.counted_steps.get(phase.name, {})}
    if phase.sample_privacy is not None:
        for client in clients:
            *kind, number = steps_of_round(training, client)
            counted[str(client)] = with_kind(counted.get(str(client)), kind, number)
    else:
        counted[EVERYONE] = [[*NOT_PRIVATE, 1]]
    state.counted_steps = {**state.counted_steps, phase.name: counted}


def update_epsilons(phase: Phase, state: PhaseState) -> None:
    """Computes the epsilons of all rounds and steps for the phase's deltas, where it has privacy of this kind.

    That of samples is the largest of any client, and infinite after any rounds without noise.
    """
    if isinstance(phase.aggregation, DifferentialPrivacy):
        rounds = [kind for of_phase in state.counted_rounds.values() for kind in of_phase]
        state.epsilon, state.delta = phase.aggregation.epsilon(rounds), phase.aggregation.delta
    if phase.sample_privacy is not None:
        is_open = any(EVERYONE in of_phase for of_phase in state.counted_steps.values())
        epsilons = [*epsilon_of_clients(phase, state).values(), *([math.inf] if is_open else [])]
        state.sample_epsilon = max(epsilons, default=0.0)
        state.sample_delta = phase.sample_privacy.delta
    elif not math.isnan(state.sample_epsilon) and EVERYONE in state.counted_steps.get(phase.name, {}):
        state.sample_epsilon = math.inf  # earlier rounds were private, under another configuration


def epsilon_of_clients(phase: Phase, state: PhaseState) -> dict[str, float]:
    """The epsilon of each client that trained in this phase or one that it starts from, by the client's id as text."""
    assert phase.sample_privacy is not None
    of_phases = [*state.counted_steps.values()]
    clients = {client for of_phase in of_phases for client in of_phase if client != EVERYONE}
    epsilon_of = cache(phase.sample_privacy.epsilon)
    ordered = sorted(clients, key=lambda client: (len(client), client))  # 2 is before 10
    return {client: epsilon_of(tuple(map(tuple, _steps_of(of_phases, client)))) for client in ordered}


def _steps_of(of_phases: Iterable[Mapping[str, Steps]], client: str) -> Steps:
    """All steps in some phases that used a client's samples, including those known only to have used everyone's."""
    return [kind for of_phase in of_phases for name in (client, EVERYONE) for kind in of_phase.get(name, [])]


def log_epsilons(run: Run, phase: Phase, training: LocalTraining) -> None:
    """Logs the epsilons of a phase, and which parts of the model DP-SGD protects; in a phase without it, which not."""
    state = run.states[phase.name]
    if not math.isnan(state.epsilon):
        what = f"(epsilon, delta)-differential privacy for each client with epsilon {state.epsilon:.3g} and delta "
        what += f"{state.delta:.3g}"
        if math.isinf(state.epsilon):
            what = "no differential privacy (epsilon is infinite), because rounds without noise are in it"
        rank_zero_info(f"{phase}: the server's model has {what}.")
    parts = _parts(training)
    if phase.sample_privacy is None:
        follows = any(other.sample_privacy is not None for other in run.phases_before(phase))
        if follows and not phase.algorithm.federated:
            what = f"it trains ({parts})" if parts else "it computes for each client"
            text = "is not protected by differential privacy, and stays with its client"
            rank_zero_info(f"{phase}: what {what} {text}.")
        return
    epsilons = epsilon_of_clients(phase, state)
    if math.isinf(state.sample_epsilon):
        text = "no differential privacy for samples (epsilon is infinite), because steps without noise are in it"
    else:
        of_all = "0 (no client was asked to train)"
        if epsilons:
            worst, mean = max(epsilons, key=lambda client: epsilons[client]), fmean(epsilons.values())
            of_all = f"{epsilons[worst]:.3g} (client {worst}; mean over clients {mean:.3g})"
        text = f"(epsilon, delta)-differential privacy for each sample with epsilon {of_all} "
        text += f"and delta {phase.sample_privacy.delta:.3g}"
    rank_zero_info(f"{phase}: all that it trains ({parts or 'nothing'}) has {text}.")


def _parts(training: LocalTraining) -> str:
    """The parts of the module that the phase trains, each with ``shared`` or ``private``."""
    parts: dict[str, Mapping[str, None]] = {}
    trained = frozenset().union(*training.trainable.keys())
    for name in sorted(name for name in trained if not name.startswith(training.idle)):
        kind = "shared" if training.algorithm.is_shared(name) else "private"
        part = name.split(".")[0]
        parts[part] = {**parts.get(part, {}), kind: None}
    return ", ".join(f"{part}: {' and '.join(kinds)}" for part, kinds in parts.items())
