"""The federation: phases, rounds, evaluation, checkpoint and log."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_info
from torch.nn.parameter import is_lazy

from fedmoe_pl.algorithms.algorithm import Update
from fedmoe_pl.backends import (
    LEAN_TRAINER,
    AutoBackend,
    Backend,
    LocalTraining,
    Plan,
    PoolBackend,
    WorkersBackend,
    data_on,
    one_thread,
)
from fedmoe_pl.backends.traffic import WAYS, Traffic
from fedmoe_pl.callbacks import (
    AccuracyMonitor,
    ClientCheckpoint,
    ClusterMonitor,
    ExpertMonitor,
    FederationCallback,
    GateMonitor,
    PartitionMonitor,
    ProgressBar,
    ResultFiles,
)
from fedmoe_pl.data import FederatedDataModule, partition_figure, partition_table
from fedmoe_pl.rounds.checkpoint import (
    FILE,
    KEPT,
    LAST,
    PhaseState,
    find_checkpoint,
    identify,
    load_checkpoint,
    load_run,
    run_versions,
    save_checkpoint,
    save_finished,
)
from fedmoe_pl.rounds.checks import (
    check_client_trainer,
    check_newcomers,
    check_phase,
    check_phases,
    check_store,
    check_trainer,
)
from fedmoe_pl.rounds.evaluation import Evaluation, evaluate_clients, personal_tensors, predict
from fedmoe_pl.rounds.flops import FlopCounter
from fedmoe_pl.rounds.phase import (
    INITIAL,
    Phase,
    begin_phase,
    evaluated_model,
    find_start,
    for_newcomers,
    keeps_parameters,
    phase_cohort,
    phase_module,
    work_of_round,
)
from fedmoe_pl.rounds.results import format_table, prediction_rows, round_row, write_csv
from fedmoe_pl.rounds.store import DiskStore, MemoryStore, Store
from fedmoe_pl.seeds import seed_all
from fedmoe_pl.trees import Tree, copy_module, load_tree

_EXCHANGED = 10**9  # tells the files of what clients keep after an exchange from those before it


class Federation:
    """Cycles the clients through Lightning Trainers and aggregates what they send.

    Args:
        phases: what is done, in order; see :class:`Phase`.
        trainer: arguments of every client's ``Trainer``; what is not given comes from ``LEAN_TRAINER``. With several
            ``devices`` as many clients are trained at the same time, each device by a process of its own.
        backend: how clients are trained; ``auto`` takes the fastest right one.
        evaluate_every_n_rounds: evaluate after every n rounds; 0 only at the end of a phase.
        callbacks: more callbacks; progress bar, result files and TensorBoard pictures are there by default, and one of
            the same class given here takes the default's place.
        logger: True for TensorBoard, False for none, or any Lightning loggers.
        default_root_dir: folder of all runs.
        name: folder of this experiment's runs in it.
        enable_checkpointing: write a checkpoint after every round, and the clients' models at the end of a phase.
        enable_progress_bar: show the progress bar.
        store: where the tensors lie that clients keep between rounds: ``memory``, or ``disk`` for a file per client in
            the run's folder, where there are too many.
        seed: everything random follows from it; on the command line it is ``seed_everything``.

    Attributes:
        run_dir: folder of this run, ``default_root_dir/name/version_N``.
        loggers: the run's loggers.
        states: where each phase begun so far stands, by name.
        rows: the rows of ``rounds.csv``.
        step: number of completed rounds of all phases; the x axis of logs.
        hparams: the resolved configuration, where there is one.

    Raises:
        MisconfigurationException: with one sentence, if an argument is out of range.
    """

    def __init__(
        self,
        phases: list[Phase],
        trainer: dict[str, Any] | None = None,
        backend: Backend | Literal["auto"] = "auto",
        evaluate_every_n_rounds: int = 1,
        callbacks: list[FederationCallback] | None = None,
        logger: bool | Logger | list[Logger] = True,
        default_root_dir: str = "runs",
        name: str = "federation",
        enable_checkpointing: bool = True,
        enable_progress_bar: bool = True,
        store: Literal["memory", "disk"] = "memory",
        seed: int = 0,
    ) -> None:
        check_phases(phases, evaluate_every_n_rounds)
        check_store(store, enable_checkpointing)
        self.phases = phases
        self.starts = {phase.name: find_start(phases, index) for index, phase in enumerate(phases)}
        self.trainer = {**LEAN_TRAINER, **(trainer or {})}
        self.backend = AutoBackend() if backend == "auto" else backend
        self.evaluate_every_n_rounds = evaluate_every_n_rounds
        callbacks = callbacks or []
        defaults = [
            *([ProgressBar()] if enable_progress_bar else []),
            *(PartitionMonitor(), AccuracyMonitor(), GateMonitor(), ExpertMonitor(), ClusterMonitor(), ResultFiles()),
            *([ClientCheckpoint()] if enable_checkpointing else []),
        ]
        given = {type(callback) for callback in callbacks}
        self.callbacks = [*(callback for callback in defaults if type(callback) not in given), *callbacks]
        self.logger = logger
        self.runs = Path(default_root_dir) / name
        self.enable_checkpointing = enable_checkpointing
        self.store = store
        self.seed = seed
        self.hparams: dict[str, Any] = {}
        self.initial: Tree = {}
        self.states: dict[str, PhaseState] = {}
        self.rows: list[dict[str, Any]] = []
        self.run_dir = self.runs
        self.loggers: list[Logger] = []
        self.newcomers = False
        self._work_in_round = 0.0
        self._plans: dict[str, Plan] = {}
        self._kept: Store = MemoryStore()

    def fit(
        self, model: LightningModule, datamodule: FederatedDataModule, ckpt_path: str | None = None
    ) -> dict[str, Evaluation]:
        """Runs all phases on the clients of the data module, and reports.

        Args:
            model: the initial model; it is not changed.
            datamodule: who holds which data.
            ckpt_path: continues the run of this checkpoint, to the same bits as if it had never stopped; ``last`` is
                the newest checkpoint of this experiment.

        Returns:
            The final evaluation of every evaluated phase, by its name.

        Raises:
            MisconfigurationException: with one sentence, before any training, if something does not fit together.
        """
        self._setup(model, datamodule, ckpt_path)
        self._log_backends()
        try:
            self.active_backend.open()
            self._fit(ckpt_path)
        finally:
            self.active_backend.close()
        return self.results

    def _fit(self, ckpt_path: str | None) -> None:
        if not ckpt_path:
            self.run_dir = self.runs / f"version_{max(run_versions(self.runs), default=-1) + 1}"
            try:
                self.run_dir.mkdir(parents=True)
            except OSError as error:
                raise MisconfigurationException(
                    f"federation.default_root_dir: '{self.run_dir}' cannot be made ({error.strerror})."
                ) from error
            if self.hparams:
                (self.run_dir / "config.yaml").write_text(yaml.safe_dump(self.hparams, sort_keys=False))
            self._checkpoint()
        in_memory = self.store == "memory"
        self._kept = MemoryStore() if in_memory else DiskStore(self.run_dir / KEPT, self.datamodule.num_clients)
        for name, state in self.states.items():
            if not state.finished:  # the run that goes on may have had the other store
                state.kept = self._kept.adopt(name, state.round, state.kept)
                if state.best_round:
                    state.best_kept = self._kept.adopt(name, state.best_round, state.best_kept)
        self._start_loggers()
        self._call("on_fit_start")
        for phase in self.phases:
            if phase.name not in self.states or not self.states[phase.name].finished:
                self._run_phase(phase)
        self._call("on_fit_end")
        for logger in self.loggers:
            logger.finalize("success")

    def personalize(
        self, model: LightningModule, datamodule: FederatedDataModule, ckpt_path: str = LAST, rounds: int = 10
    ) -> dict[str, Evaluation]:
        """Gives clients that were not in the federation their personalized models, from its checkpoint and their data.

        Federated phases are taken from the checkpoint; what clients do not share there, the new ones train in local
        rounds, of which the server learns nothing. Phases that clients do alone are done by the new ones. Clients of
        several architectures are given theirs by their numbers in the new data. Images are normalized as the
        federation's, and words have its ids. Their runs are in the folder ``newcomers`` beside the federation's.

        Args:
            model: the federation's model.
            datamodule: who of the new clients holds which data.
            ckpt_path: the federation's checkpoint; ``last`` is the newest of this experiment.
            rounds: local rounds of a federated phase whose clients keep parameters.

        Returns:
            The final evaluation of every evaluated phase, on the new clients, by its name.

        Raises:
            MisconfigurationException: with one sentence, before any training, if something does not fit together.
        """
        if rounds < 1:
            raise MisconfigurationException(f"rounds is {rounds}, but must be at least 1.")
        path = find_checkpoint(ckpt_path, self.runs)
        content = load_checkpoint(path)
        if "phases" not in content:
            raise MisconfigurationException(f"ckpt_path is '{path}', but must be the checkpoint of a federation.")
        if not any(phase.algorithm.federated for phase in self.phases):
            raise MisconfigurationException(
                "personalize needs a federated phase, whose result newcomers start from, but none of federation.phases "
                "is federated; fit trains clients alone."
            )
        self.phases = [for_newcomers(phase, str(path), rounds) for phase in self.phases]
        self.newcomers, self.runs = True, self.runs / "newcomers"  # so that `last` stays the federation's own run
        if not hasattr(datamodule, "class_shares"):  # data that were set up keep what they were read with
            datamodule.normalization, datamodule.vocabulary = content["normalization"], content["vocabulary"]
        return self.fit(model, datamodule)

    def validate(self, model: LightningModule, datamodule: FederatedDataModule, ckpt_path: str = LAST) -> None:
        """Prints the accuracy of every client's model on its validation samples, from a checkpoint."""
        datamodule.prepare_data()
        datamodule.setup()
        if not len(datamodule.validation_samples.indices):
            raise MisconfigurationException(
                "data.init_args.validation_fraction is 0, so that no client has validation samples; it must be above 0."
            )
        self._setup(model, datamodule, ckpt_path)
        print(format_table(self._evaluate_all(), ["validation"]))

    def test(self, model: LightningModule, datamodule: FederatedDataModule, ckpt_path: str = LAST) -> None:
        """Prints the table of test accuracies of every client's model, from a checkpoint."""
        self._setup(model, datamodule, ckpt_path)
        print(format_table(self._evaluate_all()))

    def predict(self, model: LightningModule, datamodule: FederatedDataModule, ckpt_path: str = LAST) -> None:
        """Writes every client's predictions on its own test samples, or the global ones, to ``predictions.csv``."""
        self._setup(model, datamodule, ckpt_path)
        path = self.run_dir / "predictions.csv"
        print(f"{write_csv(path, self._predictions())} predictions: {path}")

    def partition(self, model: LightningModule, datamodule: FederatedDataModule) -> None:
        """Prints who holds what, and draws it to ``partition.png``."""
        datamodule.prepare_data()
        datamodule.setup()
        self.runs.mkdir(parents=True, exist_ok=True)
        partition_figure(datamodule).savefig(self.runs / "partition.png")
        print(f"{partition_table(datamodule)}\n\nPicture: {self.runs / 'partition.png'}")

    def client_module(self, method: str, client: int) -> LightningModule:
        """A client's personalized model, on the CPU and in eval mode.

        Args:
            method: name of a phase that has been run or loaded.
            client: the client's id.
        """
        phase = next(phase for phase in self.phases if phase.name == method)
        state = self.states[method]
        module = self._module(phase)
        load_tree(module, state.initial)
        own = self._local_training(phase, module, state.initial).of(client)
        tensors = personal_tensors(own, own.module, state.server, client, state.kept.get(client, {}), state.round)
        load_tree(own.module, {**own.initial, **tensors})
        return own.module.eval()

    @property
    def results(self) -> dict[str, Evaluation]:
        """The final evaluation of every finished phase that is evaluated, by its name."""
        return {name: state.evaluation for name, state in self.states.items() if state.evaluation is not None}

    @property
    def step(self) -> int:
        """Number of completed rounds of all phases; the x axis of logs."""
        return sum(state.round for state in self.states.values())

    @property
    def total_work(self) -> float:
        """Samples that all clients train on in all epochs of all phases: a measure of how long the run takes."""
        return sum(phase.rounds * self.work[phase.name] for phase in self.phases)

    @property
    def completed_work(self) -> float:
        """The part of ``total_work`` that is done."""
        rounds = {phase.name: phase.rounds for phase in self.phases}
        done = sum(
            (rounds[name] if state.stopped else state.round) * self.work[name] for name, state in self.states.items()
        )
        return done + self._work_in_round

    def _client_trainer(self, phase: Phase) -> dict[str, Any]:
        given = {**self.trainer, **(phase.trainer or {})}
        if phase.callbacks:
            common = given.get("callbacks") or []
            given["callbacks"] = [*(common if isinstance(common, list) else [common]), *phase.callbacks]
        return given

    def _epochs(self, phase: Phase) -> int:
        return self.trainer["max_epochs"] if phase.max_epochs is None else phase.max_epochs

    def _finished_methods(self) -> list[Phase]:
        return [phase for phase in self.phases if phase.evaluate and phase.name in self.results]

    def _predictions(self) -> Iterator[dict[str, object]]:
        for phase in self._finished_methods():
            for client, own in enumerate(self.datamodule.test_samples):
                samples = own if len(own) else self.datamodule.global_test
                module = self.client_module(phase.name, client)
                logits, weights = predict(module, self.datamodule, samples)
                weights = weights if getattr(module, "has_global_expert", True) else None
                yield from prediction_rows(phase.name, client, samples, self.datamodule.y[samples], logits, weights)

    def _call(self, hook: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            getattr(callback, hook)(self, *arguments)

    def _setup(self, model: LightningModule, datamodule: FederatedDataModule, ckpt_path: str | None) -> None:
        """Everything that can be refused is refused here, before any training."""
        self.initial, self.states, self.rows = {}, {}, []
        checkpoint = find_checkpoint(ckpt_path, self.runs) if ckpt_path else None
        self.devices = check_trainer(self.trainer)
        for phase in self.phases:
            if phase.trainer:
                check_trainer(self._client_trainer(phase))
        self.active_backend = self._with_workers()
        datamodule.prepare_data()
        datamodule.setup()
        self.datamodule = datamodule
        self.training_data = datamodule
        if not isinstance(self.active_backend, WorkersBackend):  # whose workers place them themselves
            self.training_data = data_on(datamodule, self.devices[0])
        self.identity = identify(self.seed, datamodule)
        if self.newcomers:
            path = next(phase.ckpt_path for phase in self.phases if phase.ckpt_path)
            content = load_checkpoint(path)
            check_newcomers(path, content, self.identity)
            self.initial = content["model"]
        if checkpoint:
            rounds = {phase.name: phase.rounds for phase in self.phases}
            content = load_run(checkpoint, rounds, self.identity)
            self.initial, self.states, self.rows = content["model"], content["phases"], content["rows"]
            self.run_dir = checkpoint.parent.parent
        self.model = self._sized(copy_module(model))
        load_tree(self.model, self.initial)
        self.initial = {name: tensor.detach().cpu() for name, tensor in self.model.state_dict().items()}
        for phase in self.phases:
            module = self._module(phase)
            check_phase(phase, module, datamodule, self.seed)
            check_client_trainer(phase, self._client_trainer(phase), datamodule)
            if phase.ckpt_path:
                begin_phase(phase, module, None, self.newcomers)
        self.work = {
            phase.name: work_of_round(phase, datamodule, self.seed, self._epochs(phase)) for phase in self.phases
        }

    def _with_workers(self) -> Backend:
        """The backend, with a worker process for each device where there is more than one."""
        devices = self.trainer.get("devices", "auto")
        if isinstance(self.backend, WorkersBackend):
            if devices not in ("auto", 1):
                raise MisconfigurationException(
                    f"trainer.devices is {devices}, but {type(self.backend).__name__} has workers of its own."
                )
            return self.backend
        if len(self.devices) == 1:
            return self.backend
        # A process takes seconds to start, which many a run on a CPU does not take itself.
        lazy = self.devices[0].type == "cpu" and devices == "auto"
        return PoolBackend(self.backend, self.devices, lazy)

    def _module(self, phase: Phase) -> LightningModule:
        seed_all(self.seed)  # a gate of unknown width draws its parameters when the module is made
        return self._sized(phase_module(self.model, phase))

    def _sized(self, module: LightningModule) -> LightningModule:
        """Sizes lazy layers, such as the gate of an expert that does not tell its input's shape."""
        if any(is_lazy(parameter) for parameter in module.parameters()):
            seed_all(self.seed)
            predict(module.eval(), self.datamodule, self.datamodule.train_samples[0][:1])
        return module.train()

    def _start_loggers(self) -> None:
        if self.logger is True:
            resumed: dict[str, Any] = {"purge_step": self.step + 1} if self.step else {}
            self.loggers = [TensorBoardLogger(self.run_dir, name="", version="", **resumed)]
        elif isinstance(self.logger, Logger):
            self.loggers = [self.logger]
        else:
            self.loggers = self.logger or []

    def _training(self, phase: Phase) -> LocalTraining:
        """What the clients of a phase have in common; begins the phase if it has not begun."""
        module = self._module(phase)
        if phase.name not in self.states:
            start = self.starts[phase.name]
            state = begin_phase(phase, module, None if start == INITIAL else self.states[start], self.newcomers)
            state.kept = self._kept.adopt(phase.name, state.round, state.kept)
            self.states[phase.name] = state
        initial = self.states[phase.name].initial
        load_tree(module, initial)
        return self._local_training(phase, module, initial)

    def _local_training(self, phase: Phase, module: LightningModule, initial: Tree) -> LocalTraining:
        return LocalTraining(
            module=module,
            initial=initial,
            algorithm=phase.algorithm,
            datamodule=self.training_data,
            trainer={**self._client_trainer(phase), "max_epochs": self._epochs(phase)},
            batch_size=phase.batch_size,
            seed=self.seed,
            rounds=phase.rounds,
            device=self.devices[0],
        )

    def _log_backends(self) -> None:
        """Says how clients will be trained, and refuses what the backend cannot train."""
        phases: dict[str, list[str]] = {}
        self._plans = {}
        for phase in self.phases:
            module = self._module(phase)
            if phase.ckpt_path and not (self.newcomers and keeps_parameters(phase, module)):
                continue
            initial = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
            try:
                plan = self.active_backend.plan(self._local_training(phase, module, initial))
            except MisconfigurationException as error:
                raise MisconfigurationException(f"federation.phases '{phase.name}': {error}") from error
            self._plans[phase.name] = plan
            phases.setdefault(plan.description, []).append(phase.name)
        if phases:
            said = [f"{', '.join(names)}: {words}" for words, names in phases.items()]
            rank_zero_info("backend: " + "; ".join(said))

    def _run_phase(self, phase: Phase) -> None:
        training = self._training(phase)
        state = self.states[phase.name]
        evaluation, counter = None, FlopCounter(training)
        if phase.name in self._plans:
            self._plans[phase.name] = self._plans[phase.name].begin(training)
        while state.round < phase.rounds and not state.stopped:
            evaluation = self._run_round(phase, state, training, counter)
        self._plans.pop(phase.name, None)
        if phase.evaluate and evaluation is None:  # the last round was not evaluated, or not run just now
            evaluation = self._evaluate_round(phase, state, training)
        state.finished = True
        if state.best_round:
            state.select_best()
            evaluation = self._evaluate(phase, state, training)
        state.evaluation = evaluation
        self._call("on_phase_end", phase, state.evaluation)  # before the checkpoint: a run that goes on calls it if not
        if self.enable_checkpointing:
            save_finished(self.run_dir / FILE, phase.name, state)
        self._checkpoint()
        self._kept.remove_rest(phase.name, state.kept)

    def _run_round(
        self, phase: Phase, state: PhaseState, training: LocalTraining, counter: FlopCounter
    ) -> Evaluation | None:
        """One round (DESIGN section 3); returns its evaluation, where this round is evaluated."""
        round, algorithm = state.round, phase.algorithm
        self._call("on_round_start", phase, round)
        cohort = [*range(self.datamodule.num_clients)]
        if not self.newcomers:
            cohort = phase_cohort(phase, len(cohort), self.seed, round)
        operations = counter.of_round(state.server, cohort, state.kept, round)
        combined: Update | None = None
        written: dict[int, Any] = {}
        receiving = cohort if algorithm.federated else []  # alone, a client goes on from what it has
        down = sum((Traffic.of(algorithm.server_send(state.server, client)) for client in receiving), Traffic())
        up = Traffic()
        for group in self._plans[phase.name].train(state.server, cohort, state.kept, round):
            combined = group.update if combined is None else algorithm.combine(combined, group.update)
            written.update(self._kept.write(phase.name, round + 1, group.kept))
            up += group.sent
            for client in group.kept:
                self._work_in_round += self.work[phase.name] / len(cohort)
                self._call("on_client_end", phase, round, client)
        assert combined is not None, "a cohort has at least one client"
        state.round = round + 1
        state.kept = self._kept.updated(phase.name, state.kept, written)
        between = Traffic()
        if self.newcomers:  # they receive the result once
            down, up = down if round == 0 else Traffic(), Traffic()
        else:
            state.server = algorithm.server_update(state.server, combined)
            between = self._exchange(phase, state, round)
        for way, traffic in zip(WAYS, (down, up, between), strict=True):
            for name, value in traffic._asdict().items():
                state.traffic[f"{name}_{way}"] += value
        state.flops += operations
        self._work_in_round = 0.0
        every = self._interval(phase)
        evaluates = phase.evaluate and every and (state.round % every == 0 or state.round == phase.rounds)
        evaluation = self._evaluate_round(phase, state, training) if evaluates else None
        waited = state.round - state.improved_round if state.improved_round else 0
        state.stopped = phase.patience is not None and waited >= phase.patience * every
        if self.newcomers and phase.algorithm.federated and not state.kept:
            state.stopped = True  # what they trained is shared: further rounds would change nothing either
        self._checkpoint()
        self._kept.remove_replaced(state.kept, state.best_kept)
        self._call("on_round_end", phase, round)
        return evaluation

    def _exchange(self, phase: Phase, state: PhaseState, round: int) -> Traffic:
        """What clients send each other; all of it is computed from what they kept before it."""
        received, written = Traffic(), {}
        for client, kept, from_others in phase.algorithm.exchange(state.server, state.kept, round):
            written.update(self._kept.write(phase.name, _EXCHANGED + round + 1, {client: kept}))
            received += Traffic.of(from_others)
        if written:
            state.kept = self._kept.updated(phase.name, state.kept, written)
        return received

    def _interval(self, phase: Phase) -> int:
        given = phase.evaluate_every_n_rounds
        return self.evaluate_every_n_rounds if given is None else given

    def _evaluate_round(self, phase: Phase, state: PhaseState, training: LocalTraining) -> Evaluation:
        evaluation = self._evaluate(phase, state, training)
        row = round_row(evaluation) | state.costs()
        key = (evaluation.method, evaluation.round)
        if key not in [
            (last["method"], last["round"]) for last in self.rows[-1:]
        ]:  # a resumed run may do a round again
            self.rows.append(row)
        if phase.monitor and state.round >= phase.monitor_from_round:
            participants = phase.algorithm.participants(range(self.datamodule.num_clients), self.seed)
            mean = evaluation.spread(phase.monitor, set(participants)).mean
            state.remember_best(-mean if phase.monitor == "validation_loss" else mean, phase.min_delta)
        self._call("on_evaluation_end", phase, evaluation)
        return evaluation

    def _evaluate(self, phase: Phase, state: PhaseState, training: LocalTraining) -> Evaluation:
        last = state.finished or state.stopped or state.round == phase.rounds
        round, selection = state.round, "last round" if last else "this round"
        if state.given is not None:
            round, selection = state.given, "given checkpoint"
        elif state.finished and state.best_round:
            round, selection = state.best_round, f"best round by {phase.monitor}"
        with one_thread():
            clients = evaluate_clients(training, state.server, state.kept, self.devices[0])
        return Evaluation(
            method=phase.name,
            round=round,
            model=evaluated_model(training.module),
            moment=phase.algorithm.moment,
            selection=selection,
            clients=clients,
        )

    def _evaluate_all(self) -> list[Evaluation]:
        phases = self._finished_methods()
        return [self._evaluate(phase, self.states[phase.name], self._training(phase)) for phase in phases]

    def _checkpoint(self) -> None:
        if self.enable_checkpointing:
            path = self.run_dir / FILE
            save_checkpoint(path, self.initial, self.states, self.rows, self.identity)
