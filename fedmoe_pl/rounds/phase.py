"""A phase of a federation: one algorithm, for some rounds, from a given start."""

from __future__ import annotations

import copy
from collections import ChainMap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.cli import LRSchedulerCallable, OptimizerCallable

from fedmoe_pl.algorithms.algorithm import Algorithm, Client
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.models.gates import FixedGate, Gate
from fedmoe_pl.models.mixture import Mixing
from fedmoe_pl.rounds.checkpoint import PhaseState, load_checkpoint
from fedmoe_pl.rounds.cohort import cohort_size, sample_cohort
from fedmoe_pl.rounds.evaluation import MONITORS
from fedmoe_pl.rounds.store import check_kept, only
from fedmoe_pl.trees import Tree, copy_module, load_tree

INITIAL = "initial"
"""The name of what no phase has trained yet: the model as it was constructed."""


@dataclass
class Phase:
    """One algorithm for a number of rounds; its result is a row of the final table, and a start for later phases.

    Args:
        name: the method's name in tables, logs and files.
        algorithm: what is shared, trained and combined.
        rounds: number of rounds.
        clients_per_round: how many clients train in a round: from 1 on a number, below 1 a fraction, None all clients.
        gate: replaces the model's gate in this phase; ``GlobalOnly`` trains and evaluates the global expert alone,
            ``LocalOnly`` the local expert alone.
        mixing: replaces what the model mixes of its experts.
        start: name of the earlier phase whose result this one starts from, or ``initial`` for the untrained model;
            None takes the last phase that the algorithm follows (personalization follows the federated phase).
        max_epochs: local epochs of a client in a round; None takes the trainer's.
        batch_size: local batch size; None takes the data's.
        optimizer: local optimizer; None takes the model's. Optimizers and schedulers start anew in every round.
        lr_scheduler: its scheduler, stepped once per local epoch; None takes the model's.
        monitor: the round with the best mean of this metric over the participants (``validation``,
            ``validation_loss``, ``local_test``, ``local_test_held_out`` or ``global_test``) is the result; None takes
            the last round. All but the first two select on test data, which tables say.
        monitor_from_round: rounds before this one, counted from 1, are not selected.
        patience: ends the phase after this many evaluations in a row without a better ``monitor``; None never does.
        min_delta: a monitor counts as better for ``patience`` only by more than this.
        evaluate_every_n_rounds: evaluate after every n rounds; None takes the federation's.
        callbacks: Lightning callbacks of each client's Trainer in this phase, such as ``BestEpoch``, beside those of
            ``trainer``.
        trainer: arguments of each client's Trainer in this phase, in place of those of ``trainer``; not its devices.
        evaluate: whether the phase is a method of its own, evaluated and in the table, or only a start for others.
        ckpt_path: takes the phase's result from a federation's checkpoint (its phase of the same name) or from a
            Lightning checkpoint with the same parameter names, in place of training.
    """

    name: str
    algorithm: Algorithm
    rounds: int = 1
    clients_per_round: float | None = None
    gate: Gate | None = None
    mixing: Mixing | None = None
    start: str | None = None
    max_epochs: int | None = None
    batch_size: int | None = None
    optimizer: OptimizerCallable | None = None
    lr_scheduler: LRSchedulerCallable | None = None
    monitor: str | None = None
    monitor_from_round: int = 1
    patience: int | None = None
    min_delta: float = 0.0
    evaluate_every_n_rounds: int | None = None
    callbacks: list[Callback] | None = None
    trainer: dict[str, Any] | None = None
    evaluate: bool = True
    ckpt_path: str | None = None

    def __post_init__(self) -> None:
        """Refuses values that no federation could run."""
        key = f"federation.phases '{self.name}'"
        if not self.name or "/" in self.name or self.name == INITIAL:
            raise MisconfigurationException(
                f"{key}: name must not be empty, contain '/' or be '{INITIAL}', because files and logs are named by it."
            )
        for name, lowest in (
            ("rounds", 1),
            ("max_epochs", 0),
            ("batch_size", 1),
            ("monitor_from_round", 1),
            ("patience", 1),
            ("min_delta", 0),
            ("evaluate_every_n_rounds", 0),
        ):
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise MisconfigurationException(f"{key}: {name} is {value}, but must be at least {lowest}.")
        size = self.clients_per_round
        if size is not None and (size <= 0 or (size > 1 and size != int(size))):
            raise MisconfigurationException(
                f"{key}: clients_per_round is {size}, but must be a whole number or a fraction between 0 and 1."
            )
        if self.monitor is not None and self.monitor not in MONITORS:
            raise MisconfigurationException(
                f"{key}: monitor is '{self.monitor}', but must be one of {', '.join(MONITORS)}."
            )
        if self.monitor and not self.evaluate:
            raise MisconfigurationException(f"{key}: monitor is '{self.monitor}', which needs evaluate: true.")
        if self.patience and not self.monitor:
            raise MisconfigurationException(f"{key}: patience is {self.patience}, which needs a monitor.")
        if self.monitor and self.evaluate_every_n_rounds == 0:
            raise MisconfigurationException(
                f"{key}: evaluate_every_n_rounds is 0, but monitor is '{self.monitor}'; it must be at least 1."
            )
        for name in ("accelerator", "devices", "num_nodes"):
            if name in (self.trainer or {}):
                raise MisconfigurationException(
                    f"{key}: trainer has {name}, which is the same for all phases; it belongs to the section trainer."
                )
        if "max_epochs" in (self.trainer or {}):
            raise MisconfigurationException(f"{key}: trainer has max_epochs, which a phase takes as `max_epochs`.")
        if self.monitor_from_round > self.rounds:
            raise MisconfigurationException(
                f"{key}: monitor_from_round is {self.monitor_from_round}, but must be at most rounds, {self.rounds}."
            )


def find_start(phases: Sequence[Phase], index: int) -> str:
    """Name of the phase that a phase starts from, or ``initial``.

    Raises:
        MisconfigurationException: if the named phase does not come before, or none does that the algorithm needs.
    """
    phase, earlier = phases[index], phases[:index]
    names = [other.name for other in earlier]
    if phase.start is not None:
        if phase.start not in (INITIAL, *names):
            raise MisconfigurationException(
                f"federation.phases '{phase.name}': start is '{phase.start}', but must be '{INITIAL}' or an earlier "
                f"phase{': ' + ', '.join(names) if names else ', and there is none'}."
            )
        return phase.start
    followed = [other.name for other in earlier if phase.algorithm.follows(other.algorithm)]
    if not followed and type(phase.algorithm).follows is not Algorithm.follows:
        raise MisconfigurationException(
            f"federation.phases '{phase.name}': {type(phase.algorithm).__name__} starts from an earlier phase, but "
            f"none of [{', '.join(names)}] fits; add one before it or name one with `start`."
        )
    return followed[-1] if followed else INITIAL


def begin_phase(
    phase: Phase, module: LightningModule, before: PhaseState | None, newcomers: bool = False
) -> PhaseState:
    """The phase's state before its first round; loads its initial tensors into the module.

    Args:
        phase: the phase.
        module: the phase's module.
        before: the state of the phase that it starts from; None for the initial model.
        newcomers: whether the clients are others than those of the phase's checkpoint: what these kept is not theirs,
            and what clients do not share they train themselves.
    """
    initial = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
    inherited = [name for name in initial if not (phase.gate and name.startswith("gate."))]
    if before is not None:
        initial |= _only(inherited, {**before.initial, **before.server})
    load_tree(module, initial)
    server = phase.algorithm.server_init(module)
    # What the server sends now takes the place of what clients kept of it before.
    kept = only({} if before is None else before.kept, [name for name in inherited if name not in server])
    if phase.ckpt_path is None:
        return PhaseState(initial, server, kept)
    content = load_checkpoint(phase.ckpt_path)
    key = f"federation.phases '{phase.name}': ckpt_path is '{phase.ckpt_path}'"
    if "phases" not in content:  # a checkpoint of Lightning
        shared = [name for name in server if name in initial]  # the rest is what the algorithm itself keeps count of
        missing = [name for name in shared if name not in content["state_dict"]]
        if missing:
            raise MisconfigurationException(f"{key}, which has no '{missing[0]}'; it must have all shared parameters.")
        given = PhaseState({}, {**server, **_only(shared, content["state_dict"])})
    else:
        finished = [name for name, state in content["phases"].items() if state.finished]
        if phase.name not in finished:
            raise MisconfigurationException(f"{key}, whose finished phases are {finished}; '{phase.name}' must be one.")
        given = content["phases"][phase.name]
    load_tree(module, _only(initial, given.server))
    missing = [name for name in server if name not in given.server]
    if missing:
        raise MisconfigurationException(
            f"{key}, where '{phase.name}' was another method or model: it has no '{missing[0]}'."
        )
    if newcomers:
        round = 0 if keeps_parameters(phase, module) else phase.rounds
        return PhaseState(initial, given.server, kept, round=round, given=given.best_round or given.round)
    check_kept(given.kept)
    kept = ChainMap(given.kept, kept)  # pyright: ignore[reportArgumentType]  only read; in one dict, it may be too large
    return PhaseState(initial, given.server, kept, round=phase.rounds, given=given.best_round or given.round)


def keeps_parameters(phase: Phase, module: LightningModule) -> bool:
    """Whether clients train parameters in this phase that they do not share."""
    return any(
        parameter.requires_grad and phase.algorithm.is_trainable(name, 0, 0) and not phase.algorithm.is_shared(name)
        for name, parameter in module.named_parameters()
    )


def for_newcomers(phase: Phase, ckpt_path: str, rounds: int) -> Phase:
    """The phase as clients go through it that were not in the federation.

    Args:
        phase: the federation's phase.
        ckpt_path: the federation's checkpoint.
        rounds: local rounds of a federated phase, in which they train what clients keep.
    """
    if not phase.algorithm.federated:
        return replace(phase, ckpt_path=None)
    return replace(
        phase,
        ckpt_path=ckpt_path,
        rounds=rounds,
        clients_per_round=None,
        monitor=None,
        monitor_from_round=1,
        patience=None,
    )


def _only(names: Iterable[str], tree: Tree) -> Tree:
    return {name: tree[name] for name in names if name in tree}


def phase_module(model: LightningModule, phase: Phase) -> LightningModule:
    """A copy of the model, with the phase's gate, mixing, optimizer and scheduler.

    Raises:
        MisconfigurationException: if the phase has one of these and the model is not a ``MixtureOfExperts``.
    """
    module = copy_module(model)
    for part in ("gate", "mixing", "optimizer", "lr_scheduler"):
        replacement = getattr(phase, part)
        if replacement is None:
            continue
        if not isinstance(module, MixtureOfExperts):
            raise MisconfigurationException(
                f"federation.phases '{phase.name}': {part} is given, but the model is a {type(module).__name__} and "
                "only a MixtureOfExperts lets a phase replace it."
            )
        setattr(module, part, copy.deepcopy(replacement) if part == "gate" else replacement)
        module.check_parts()
    return module


def work_of_round(phase: Phase, datamodule: FederatedDataModule, seed: int, epochs: int) -> float:
    """Samples that the clients train on in all epochs of a round, estimated from the first client's share."""
    if phase.ckpt_path:
        return 0.0
    samples = datamodule.train_samples
    first = Client(id=0, round=0, seed=seed, module=LightningModule(), samples=samples[0], kept={})
    share = len(phase.algorithm.client_samples(first)) / len(samples[0])
    cohort = len(phase_cohort(phase, len(samples), seed, round=0)) / len(samples)
    return epochs * cohort * share * len(samples.indices)


def phase_cohort(phase: Phase, num_clients: int, seed: int, round: int) -> list[int]:
    """The clients of a round: drawn from the participants, as many as if all took part (METHODS section 7.4)."""
    participants = phase.algorithm.participants(range(num_clients), seed)
    size = len(participants) if phase.clients_per_round is None else cohort_size(num_clients, phase.clients_per_round)
    return sample_cohort(participants, size, seed, round)


def evaluated_model(module: LightningModule) -> str:
    """What of the module an evaluation evaluates, in the words of ``Evaluation.model``."""
    if not isinstance(module, MixtureOfExperts):
        return type(module).__name__
    if isinstance(module.gate, FixedGate) and len(module.gate.active) == 1:
        if not module.has_global_expert:
            return "one expert"
        return "local expert" if module.gate.active[0] == len(module.gate.weights) - 1 else "global expert"
    return "mixture"
