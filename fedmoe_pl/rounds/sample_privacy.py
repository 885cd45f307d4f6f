"""What DP-SGD costs each client, and how much noise keeps the costs below a target."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from lightning.pytorch.utilities import rank_zero_info

from fedmoe_pl.aggregation.accountant import noise_for
from fedmoe_pl.backends import LocalTraining, client_of
from fedmoe_pl.checkpoints.phase_state import EVERYONE, NOT_PRIVATE, PhaseState
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import poisson_sampling
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import Run

Steps = list[list[float]]
"""For every kind of step: the probability with which samples join it, the noise multiplier, and how many there are."""


def set_noise(run: Run) -> None:
    """Finds the noise multipliers of phases with a ``target_epsilon``, each client's own, before any training."""
    planned: dict[tuple[str, int], Steps] = {}
    known: dict[tuple[object, ...], float] = {}
    for phase in run.phases:
        privacy = phase.sample_privacy
        if privacy is None:
            continue
        training = run.local_training(phase, module := run.module(phase), dict(module.state_dict()))
        noise: dict[int, float] = {}
        for client in run.clients:
            probability, steps = _sampling(training, client)
            number = steps * training.max_epochs * phase.rounds
            before = [kind for other in run.phases_before(phase) for kind in planned.get((other.name, client), [])]
            z = privacy.noise_multiplier
            if z is None:
                key = probability, number, str(before), privacy.target_epsilon, privacy.delta
                if key not in known:
                    assert privacy.target_epsilon is not None, "DPSGD has checked it"
                    known[key] = noise_for(privacy.target_epsilon, privacy.delta, probability, number, before)
                z = noise[client] = known[key]
            if math.isinf(z):
                because = f"client {client} spends more in the phases that this one starts from"
                value = privacy.target_epsilon
                raise InvalidArgumentError(str(phase), "sample_privacy.target_epsilon", value, "higher", because)
            planned[phase.name, client] = [[probability, z, number]] if number else []
        if privacy.noise_multiplier is None:
            run.noise_multipliers[phase.name] = noise


def _sampling(training: LocalTraining, client: int) -> tuple[float, int]:
    """The probability with which samples of a client join a batch, and the number of batches of an epoch."""
    training = training.of(client)
    samples = training.algorithm.client_samples(client_of(training, training.module, client, {}, round=0))
    return poisson_sampling(len(samples), training.batch_size or training.datamodule.batch_size)


def steps_of_round(training: LocalTraining, client: int) -> list[float]:
    """A client's steps in a round: the probability of samples, the noise multiplier, and how many there are."""
    probability, steps = _sampling(training, client)
    return [probability, training.noise_multiplier(client), steps * training.max_epochs]


def count_steps(phase: Phase, state: PhaseState, training: LocalTraining, clients: Collection[int]) -> None:
    """Adds a round's steps of the clients that were asked to train, whether they answered or not."""
    counted = {**state.counted_steps.get(phase.name, {})}
    if phase.sample_privacy is not None:
        for client in clients:
            *kind, number = steps_of_round(training, client)
            *before, last = counted.get(str(client)) or [[*kind, 0]]
            same = last[:2] == kind
            counted[str(client)] = [*before, [*kind, last[2] + number]] if same else [*before, last, [*kind, number]]
    elif phase.algorithm.federated:
        counted[EVERYONE] = [[*NOT_PRIVATE, 1]]
    if counted:
        state.counted_steps = {**state.counted_steps, phase.name: counted}
    update_sample_epsilon(phase, state)


def update_sample_epsilon(phase: Phase, state: PhaseState) -> None:
    """Computes the epsilon of the client whose steps cost most, for the phase's delta; otherwise it stays as it was."""
    if phase.sample_privacy is not None:
        is_open = any(EVERYONE in of_phase for of_phase in state.counted_steps.values())
        epsilons = [*epsilon_of_clients(phase, state).values(), *([math.inf] if is_open else [])]
        state.sample_epsilon = max(epsilons, default=0.0)
        state.sample_delta = phase.sample_privacy.delta
    elif phase.algorithm.federated and not math.isnan(state.sample_epsilon) and state.round and state.server_learns:
        state.sample_epsilon = math.inf  # its earlier rounds were private, with another configuration


def epsilon_of_clients(phase: Phase, state: PhaseState) -> dict[str, float]:
    """The epsilon of each client that trained, in this phase or one that it starts from, by its id as text."""
    assert phase.sample_privacy is not None
    of_phases = [*state.counted_steps.values()]
    clients = {client for of_phase in of_phases for client in of_phase if client != EVERYONE}
    known: dict[str, float] = {}
    epsilons = {}
    for client in sorted(clients, key=lambda client: (len(client), client)):  # 2 is before 10
        steps = [kind for of_phase in of_phases for name in (client, EVERYONE) for kind in of_phase.get(name, [])]
        if str(steps) not in known:
            known[str(steps)] = phase.sample_privacy.epsilon(steps)
        epsilons[client] = known[str(steps)]
    return epsilons


def log_sample_epsilon(run: Run, phase: Phase, state: PhaseState, training: LocalTraining) -> None:
    """Logs which parts of the model are protected, and what that cost; of other phases, what is not protected."""
    parts = _parts(training)
    if phase.sample_privacy is None:
        follows = any(other.sample_privacy is not None for other in run.phases_before(phase))
        if follows and not phase.algorithm.federated:
            what = f"it trains ({parts})" if parts else "it computes for each client"
            text = "is not protected by differential privacy, and stays with its client"
            rank_zero_info(f"{phase}: what {what} {text}.")
        return
    epsilons = epsilon_of_clients(phase, state)
    worst = max(epsilons, key=lambda client: epsilons[client], default="")
    if math.isinf(state.sample_epsilon):
        text = "no differential privacy for samples (epsilon is infinite), because steps without noise are in it"
    else:
        of_all = f"client {worst}; mean over clients {sum(epsilons.values()) / len(epsilons):.3g}"
        text = f"(epsilon, delta)-differential privacy for each sample with epsilon {epsilons[worst]:.3g} ({of_all}) "
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
