"""The state of a run, and the callbacks that can read it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torchmetrics import Metric

from fedmoe_pl.algorithms.algorithm import EvaluationPoint
from fedmoe_pl.backends import Backend, LocalTraining, Plan, Transfer
from fedmoe_pl.backends.optimizers import with_strides_of
from fedmoe_pl.checkpoints.checkpoint import CLIENT_STATES, FILE, CheckpointWriter
from fedmoe_pl.checkpoints.client_state import FileStore, MemoryStore, Store
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.checks import check_choice
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.evaluation.client_models import client_predictor, evaluate_points, personal_tensors
from fedmoe_pl.evaluation.outputs import load_to_evaluate
from fedmoe_pl.evaluation.results import ClientEvaluation, Evaluation
from fedmoe_pl.logs.loggers import RunLoggers
from fedmoe_pl.logs.progress import Progress
from fedmoe_pl.phases.client_failures import ClientFailures
from fedmoe_pl.phases.participation import cohort_of, evaluated_clients
from fedmoe_pl.phases.phase import INITIAL, Phase
from fedmoe_pl.phases.starts import Start, chain_of_starts, model_of, sources
from fedmoe_pl.rounds.begin import begin_phase, evaluates_trained, phase_module, sized
from fedmoe_pl.seeds import named_seed, seed_all
from fedmoe_pl.trees import Tree, copy_module, load_tree


class FederationCallback:
    """Hooks of a federation; each does nothing by default.

    A Lightning ``Callback`` in the ``trainer:`` section sees one client's training; a ``FederationCallback`` sees
    what happens between the rounds. It may read the attributes of :class:`Run`.

    Attributes:
        needs_clients: whether it uses samples or models of clients, such as ``Run.client_modules``. A deployed
            federation, whose server has neither, leaves it out.
    """

    needs_clients: bool = False

    def on_fit_start(self, run: Run) -> None:
        """Called once, after every check and before the first round."""

    def on_round_start(self, run: Run, phase: Phase, round: int) -> None:
        """Called before the clients of a round train; ``round`` counts from 0 in every phase."""

    def on_client_end(self, run: Run, phase: Phase, round: int, client: int) -> None:
        """Called when a client has finished its local training."""

    def on_server_update(self, run: Run, phase: Phase, round: int) -> None:
        """Called after the server's state was updated, before the round's evaluation and checkpoint."""

    def on_evaluation_end(self, run: Run, phase: Phase, evaluation: Evaluation) -> None:
        """Called after each evaluation: for every evaluation point of a round, and after some epochs if asked for."""

    def on_transfers(self, run: Run, phase: Phase, round: int, transfers: list[Transfer]) -> None:
        """Called before a round's checkpoint with every tensor that was sent in the round, if there are any."""

    def on_round_end(self, run: Run, phase: Phase, round: int) -> None:
        """Called after a round's aggregation, evaluation and checkpoint."""

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Called with the final evaluation of the phase; None if the phase is not evaluated."""

    def on_fit_end(self, run: Run) -> None:
        """Called once, after the last phase."""


def store_of(run: Run) -> Store:
    """Makes the store of what clients keep: in files, or in memory without checkpoints."""
    if not run.enable_checkpointing:
        return MemoryStore()
    return FileStore(run.folder / CLIENT_STATES, run.datamodule.num_clients)


@dataclass(eq=False, kw_only=True)
class Settings:
    """The settings that a run takes from its federation, where they are described.

    Attributes:
        starts: what each phase starts from, by phase name (``starts.find_starts``).
        folder: the run's folder, ``default_root_dir/name/version_N``; it may not exist yet.
        evaluate: evaluates the clients' models; by default, in this process and its workers (``evaluate_points``).
        make_store: makes the store of what clients keep.
    """

    phases: Sequence[Phase]
    starts: dict[str, Start]
    trainer: dict[str, Any]
    backend: Backend
    callbacks: Sequence[FederationCallback]
    seed: int
    evaluate_every_n_rounds: int
    evaluation_cohort_size: int | None
    enable_checkpointing: bool
    hparams: dict[str, Any]
    folder: Path
    failures: ClientFailures
    metrics: dict[str, Metric]
    evaluate: Callable[..., list[list[ClientEvaluation]]] = evaluate_points
    make_store: Callable[[Run], Store] = store_of


@dataclass(eq=False, kw_only=True)
class Saved:
    """The state from which a run continues; the defaults start a new run.

    Attributes:
        states: the state of each phase that has begun, by name.
        rows: the rows of ``rounds.csv``.
        writer: writes the next checkpoints; None until the first one.
        only_client: in a deployed federation, the one client on this machine; None if all clients are here.
    """

    states: dict[str, PhaseState] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    writer: CheckpointWriter | None = None
    only_client: int | None = None


@dataclass(eq=False, kw_only=True)
class Run(Settings, Saved):
    """One run of a federation: its settings and its state.

    Attributes:
        devices: the device of each process that trains clients.
        models: the initial models: the federation's, under ``INITIAL``, and those that phases bring, by phase name.
        datamodule: the data and the clients that hold them; already set up.
        training_data: the same data with the samples on the device that clients train on.
        identity: the run's seed and data (``resume.identify``).
        configuration: the settings that the result depends on (``configuration.configuration``).
        record: these settings for reports, which compare them between runs (``configuration.recorded``).
        loggers: the run's loggers, as callbacks use them.
        store: holds the tensors that clients keep between rounds.
        given_results: results from checkpoints, by phase name.
        plans: how the clients of each phase are trained, by phase name; each is removed when its phase begins.
        noise_multipliers: by phase and client, if noise follows from a target (``privacy.set_noise``).
        secret: on the server of a deployed federation, what the noise of aggregations and their Poisson cohorts follow
            from in place of the seed, which clients know; None for the seed.
        logged: with ``trainer.logger``, the means that each client of the last round logged, one dict per epoch.
        other_test_set: a note to print below results on a test set other than the run's own; empty for its own.
    """

    devices: list[torch.device]
    models: dict[str, LightningModule]
    datamodule: FederatedDataModule
    training_data: FederatedDataModule
    identity: dict[str, Any]
    configuration: dict[str, str]
    record: dict[str, Any]
    loggers: RunLoggers = field(default_factory=RunLoggers)
    store: Store = field(default_factory=MemoryStore)
    given_results: dict[str, PhaseState] = field(default_factory=dict)
    plans: dict[str, Plan] = field(default_factory=dict)
    noise_multipliers: dict[str, dict[int, float]] = field(default_factory=dict)
    secret: int | None = None
    logged: dict[int, list[dict[str, float]]] = field(default_factory=dict)
    other_test_set: str = ""

    @cached_property
    def evaluated(self) -> list[int]:
        """Ids of the clients that are evaluated."""
        if self.only_client is not None:
            return [self.only_client]
        return evaluated_clients(self.datamodule.num_clients, self.evaluation_cohort_size, self.seed)

    @property
    def clients(self) -> Sequence[int]:
        """Ids of the clients on this machine."""
        return range(self.datamodule.num_clients) if self.only_client is None else [self.only_client]

    @property
    def model(self) -> LightningModule:
        """The federation's initial model."""
        return self.models[INITIAL]

    @cached_property
    def initial(self) -> dict[str, Tree]:
        """The tensors of the initial models, by the keys of ``models``."""
        return {
            key: {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
            for key, model in self.models.items()
        }

    @cached_property
    def progress(self) -> Progress:
        """The progress of the run."""
        return Progress(self.phases, self.trainer, self.datamodule, self.seed, self.given_results, self.initial_model)

    @cached_property
    def records_transfers(self) -> bool:
        """Whether a callback overrides ``on_transfers``, so that every tensor that is sent must be described."""
        return any(type(each).on_transfers is not FederationCallback.on_transfers for each in self.callbacks)

    @property
    def results(self) -> dict[str, Evaluation]:
        """The final evaluations of all finished phases, by method."""
        return {each.method: each for state in self.states.values() for each in state.evaluations}

    @property
    def step(self) -> int:
        """The number of completed rounds, summed over all phases."""
        return sum(state.round for state in self.states.values())

    def phases_before(self, phase: Phase) -> list[Phase]:
        """The phases whose training this phase starts from, directly or through others."""
        return chain_of_starts(self.phases, self.starts, phase.name)[1:]

    def rounds_before(self, phase: Phase) -> int:
        """The rounds of a phase's longest chain of starts; a given result counts with its own rounds if it had more."""
        names = {name for _, name in sources(self.starts[phase.name])}
        rounds = []
        for before in (other for other in self.phases if other.name in names):
            state = self.states.get(before.name) or self.given_results.get(before.name)
            rounds.append(self.rounds_before(before) + max(before.rounds, state.given_round or 0 if state else 0))
        return max(rounds, default=0)

    def client_module(self, method: str, client: int | str) -> LightningModule:
        """A client's personalized model, on the CPU and in eval mode.

        Args:
            method: name of a phase that has begun, or of its row in the table.
            client: the client's number or name.

        Raises:
            MisconfigurationException: if there is no such method or client.
        """
        return next(self.client_modules(method, [self.datamodule.client_names.number("Federation", client)]))

    def client_modules(self, method: str, clients: Iterable[int]) -> Iterator[LightningModule]:
        """Yields the :meth:`client_module` of each of several clients."""
        phase, evaluation_point = self.phase_and_point(method)
        training = self.training(phase)
        for client in clients:
            yield self._client_module(training.of(client), phase, evaluation_point, client)

    def client_predictor(self, method: str, client: int) -> LightningModule:
        """The model that a client predicts with: its :meth:`client_module`, or one with ``Algorithm.predictor``."""
        phase, evaluation_point = self.phase_and_point(method)
        state, training = self.states[phase.name], self.training(phase).of(client)
        module = self._client_module(training, phase, evaluation_point, client)
        return client_predictor(training, module, state.server, client, state.clients, state.round_of_models)

    def _client_module(
        self, training: LocalTraining, phase: Phase, evaluation_point: EvaluationPoint, client: int
    ) -> LightningModule:
        self.datamodule.client_names.number("Federation", client)  # refuses ids that no client has
        state = self.states[phase.name]
        kept = state.clients.get(client, {})
        module = copy_module(training.module)
        arguments = state.server, client, kept, state.round_of_models, evaluation_point
        load_to_evaluate(module, {**training.initial, **personal_tensors(training, module, *arguments)})
        return module

    def phase_and_point(self, method: str) -> tuple[Phase, EvaluationPoint]:
        """The phase and evaluation point of a table's row; refuses unknown methods."""
        begun = [phase for phase in self.phases if phase.name in self.states]
        rows: dict[str, tuple[Phase, EvaluationPoint]] = {
            phase.method(point): (phase, point) for phase in begun for point in phase.evaluation_points
        }
        check_choice("Federation", "method", method, tuple(rows))
        return rows[method]

    def call(self, hook: str, *arguments: Any) -> None:
        """Calls a hook of every callback."""
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)

    def module(self, phase: Phase) -> LightningModule:
        """A new module for the phase: a copy of the initial model with the phase's own gate and optimizer."""
        seed = named_seed(self.seed, phase.name)
        seed_all(seed)  # a gate of unknown input width draws its parameters here
        return sized(phase_module(self.initial_model(phase), phase), self.datamodule, seed)

    def initial_model(self, phase: Phase) -> LightningModule:
        """The initial model that the phase's module is a copy of."""
        return self.models[model_of(self.phases, self.starts, phase.name)]

    def state_of(self, phase: Phase, module: LightningModule) -> PhaseState:
        """The phase's state; begins the phase with this module if it has not begun."""
        if phase.name not in self.states:
            before = [(part, self.states[name]) for part, name in sources(self.starts[phase.name])]
            state = begin_phase(phase, module, before, self.given_results.get(phase.name))
            state.clients = self.store.adopt(phase.name, state.round, state.clients)
            self.states[phase.name] = state
        state = self.states[phase.name]
        state.initial, state.server, state.best_server = (
            _in_format_of(module, tree) for tree in (state.initial, state.server, state.best_server)
        )
        return state

    def training(self, phase: Phase) -> LocalTraining:
        """The local training of a phase that has begun."""
        return self.local_training(phase, self.module(phase), self.states[phase.name].initial)

    def local_training(self, phase: Phase, module: LightningModule, initial: Tree) -> LocalTraining:
        """The local training of a phase; loads the initial tensors into the module."""
        load_tree(module, initial)
        state = self.states.get(phase.name)
        server_learns = state is None or state.server_learns
        secure = phase.secure if server_learns else None
        cohort = cohort_of(phase, self.datamodule.num_clients, self.seed)
        if secure is not None:
            secure = replace(secure, threshold=secure.needed(cohort.size))
        return LocalTraining(
            module=module,
            initial=initial,
            algorithm=phase.algorithm,
            datamodule=self.training_data,
            trainer=phase.client_trainer(self.trainer),
            batch_size=phase.train.batch_size,
            seed=self.seed,
            participants=cohort.participants,
            rounds=phase.rounds,
            rounds_before=self.rounds_before(phase),
            round_lr_scheduler=phase.train.round_lr_scheduler,
            keep_optimizer=phase.train.keep_optimizer,
            aggregation=phase.aggregation if server_learns else None,
            secure_aggregation=secure,
            sample_privacy=phase.sample_privacy,
            noise_multipliers=self.noise_multipliers.get(phase.name, {}),
            keep_trained=evaluates_trained(phase),
            record_transfers=self.records_transfers,
            device=self.devices[0],
            client_timeout=self.failures.timeout,
            phase_name=phase.name,
            run_name="/".join(self.folder.relative_to(self.folder.anchor).parts[-3:]),
            metrics=self.metrics,
        )

    def save(self, finished: str | None = None, in_round: Mapping[str, PhaseState] | None = None) -> None:
        """Writes the checkpoint, if enabled, after flushing the loggers, so that each round in it has its logs.

        The phase named by ``finished``, which has just ended, is also written to a file of its own. The states in
        ``in_round`` are saved in place of those of phases that are in a round.
        """
        if not self.enable_checkpointing:
            return
        self.loggers.flush()
        if self.writer is None:
            self.writer = CheckpointWriter(self.folder / FILE)
        if finished is not None:
            self.writer.write_finished(finished, self.states[finished])
        states = {**self.states, **(in_round or {})}
        self.writer.write(self.initial, states, self.rows, **self.identity, configuration=self.configuration)


def _in_format_of(module: LightningModule, tree: Tree) -> Tree:
    """The tree in the module's memory format, which files do not have and the last bits of convolutions depend on."""
    like = {name: tensor for name, tensor in module.state_dict().items() if tensor.dim() > 3}
    return tree | {name: with_strides_of(tensor, tree[name]) for name, tensor in like.items() if name in tree}
