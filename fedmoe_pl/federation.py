"""The federation: its settings and its commands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger
from torchmetrics import Metric

from fedmoe_pl.backends import LEAN_TRAINER, AutoBackend, Backend
from fedmoe_pl.callbacks import FederationCallback, with_defaults
from fedmoe_pl.callbacks.result_files import write_partition
from fedmoe_pl.checkpoints.checkpoint import LAST, find_checkpoint, locked
from fedmoe_pl.checkpoints.configuration import configuration, recorded
from fedmoe_pl.checkpoints.resume import check_configuration, identify, keys_of, load_run, name_of_test_set
from fedmoe_pl.checks import InvalidArgumentError, check_at_least, check_made, is_path_below, plain
from fedmoe_pl.commands.export import export_clients
from fedmoe_pl.commands.personalize import phases_of_new_clients, set_up_new_clients
from fedmoe_pl.commands.predict import evaluate_all, write_predictions
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.partition_report import log_partition
from fedmoe_pl.deployment.audit import PhaseAudit, audit_run, format_audit
from fedmoe_pl.deployment.reports import Reports
from fedmoe_pl.deployment.serve_and_join import DEFAULT_ADDRESS, run_client, run_server
from fedmoe_pl.evaluation.metrics import check_metrics
from fedmoe_pl.evaluation.outputs import ClientModule
from fedmoe_pl.evaluation.results import Evaluation
from fedmoe_pl.logs.summary import format_table, format_validation
from fedmoe_pl.phases.client_failures import ClientFailures
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.phases.starts import find_starts
from fedmoe_pl.rounds.fit import fit
from fedmoe_pl.rounds.given_result import ReadResult, read_result, read_result_for_new_clients, with_gate_of
from fedmoe_pl.rounds.interruption import interruptible, requeued
from fedmoe_pl.rounds.run import Run, Saved, Settings
from fedmoe_pl.setup.check_run import check_phases
from fedmoe_pl.setup.check_trainer import check_loggers
from fedmoe_pl.setup.data import set_up, set_up_as_saved
from fedmoe_pl.setup.start import make_run, open_run, plan_phases
from fedmoe_pl.trees import Tree

_SKIP = ClientFailures()
_REPORTS = Reports()


class Federation:
    """Trains the clients with Lightning Trainers and aggregates what they send.

    It holds the settings. Each command makes a new :class:`Run`, and gives the same result however often it is called.

    Args:
        phases: the phases, in order; see :class:`Phase`.
        trainer: arguments of every client's ``Trainer``; those left out come from ``LEAN_TRAINER``, or are
            Lightning's defaults whatever ``PL_TRAINER_...`` in the environment says. With several ``devices``, as many
            clients are trained at the same time, in one process per device; with ``strategy`` ``ddp``, they train one
            client together, each process a share of every batch.
        backend: how clients are trained; ``auto`` takes the fastest one that gives the right result.
        evaluate_every_n_rounds: evaluate after every n rounds; 0 only at the end of a phase.
        callbacks: beside those for progress bar, result files and pictures; one of a default's class replaces it.
        logger: True for TensorBoard, False for none, or any Lightning loggers.
        default_root_dir: folder of all runs.
        name: name of the folder in it for this experiment's runs.
        enable_checkpointing: write a checkpoint after every round, and what clients keep to files; else all of it is in
            memory, and lost with the process.
        enable_progress_bar: show the progress bar.
        seed: the seed of all random numbers but those of the partition, which has its own (``partition_seed`` of the
            data); of any size; ``seed_everything`` on the command line.
        evaluation_cohort_size: how many clients are evaluated, drawn at random once for all phases; None for all.
            A phase's ``select`` counts those among them that take part in it. ``personalize`` evaluates all new
            clients.
        failures: what happens when clients fail, or drop out.
        metrics: metrics of torchmetrics, by name, computed for each client; such as ``f1``.
        reports: what a client of a deployed federation reports of evaluations.

    Attributes:
        runs: folder of this experiment's runs, ``default_root_dir/name``.
        hparams: the resolved configuration of the command line; empty without one.
        command: the command line, without ``--ckpt_path``; empty without one.

    Raises:
        MisconfigurationException: if an argument is out of range, or phases do not fit together.
    """

    def __init__(
        self,
        phases: list[Phase],
        trainer: dict[str, Any] | None = None,
        backend: Backend | Literal["auto"] = "auto",
        evaluate_every_n_rounds: int = 1,
        callbacks: list[FederationCallback] | None = None,
        logger: Logger | list[Logger] | bool = True,
        default_root_dir: str = "runs",
        name: str = "federation",
        enable_checkpointing: bool = True,
        enable_progress_bar: bool = True,
        seed: int = 0,
        evaluation_cohort_size: int | None = None,
        failures: ClientFailures = _SKIP,
        metrics: dict[str, Metric] | None = None,
        reports: Reports = _REPORTS,
    ) -> None:
        self.metrics = check_metrics(metrics)
        check_at_least(self, "evaluate_every_n_rounds", evaluate_every_n_rounds, 0)
        of_clients = "a list of FederationCallbacks; those of Lightning are arguments of the clients' trainer"
        for argument, value, fits, allowed in (
            ("phases", phases, _are_all(phases, Phase), "a list of Phases"),
            ("trainer", trainer, isinstance(trainer, dict | None), "a dict of arguments of a Trainer"),
            ("backend", backend, backend == "auto" or isinstance(backend, Backend), "a Backend or 'auto'"),
            ("callbacks", callbacks, _are_all(callbacks or [], FederationCallback), of_clients),
            (
                "logger",
                logger,
                isinstance(logger, bool | Logger) or _are_all(logger, Logger),
                "a Logger, True or False",
            ),
            ("failures", failures, isinstance(failures, ClientFailures), "ClientFailures"),
            ("reports", reports, isinstance(reports, Reports), "Reports"),
            ("seed", seed, seed is not None, "an integer of at least 0"),
            ("evaluate_every_n_rounds", evaluate_every_n_rounds, evaluate_every_n_rounds is not None, "an integer"),
        ):
            if not fits:
                raise InvalidArgumentError(self, argument, value, allowed)
            for each in value if isinstance(value, list) else [value]:
                check_made(self, argument, each)
        check_phases(phases, evaluate_every_n_rounds)
        reports.check(self.metrics)
        if name and not is_path_below(name):
            raise InvalidArgumentError(self, "name", name, "that of a folder below default_root_dir, without '..'")
        check_at_least(self, "evaluation_cohort_size", evaluation_cohort_size, 1)
        check_at_least(self, "seed", seed, 0, highest=None)
        self.failures = failures
        self.reports = reports
        self.phases = phases
        self.starts = find_starts(phases)
        self.trainer = {name: plain(value) for name, value in {**LEAN_TRAINER, **(trainer or {})}.items()}
        check_loggers(logger, (phase.client_trainer(self.trainer) for phase in phases))
        self.backend = AutoBackend() if backend == "auto" else backend
        self.evaluate_every_n_rounds = plain(evaluate_every_n_rounds)
        self.evaluation_cohort_size = plain(evaluation_cohort_size)
        self.callbacks = with_defaults(callbacks or [], enable_progress_bar)
        self.logger = logger
        self.runs = Path(default_root_dir) / name
        self.enable_checkpointing = enable_checkpointing
        self.seed = plain(seed)
        self.hparams: dict[str, Any] = {}
        self.command = ""
        self._run: Run | None = None

    def __repr__(self) -> str:
        return f"Federation({', '.join(phase.name for phase in self.phases)}; runs in {self.runs})"

    @property
    def run(self) -> Run:
        """The run of the last command; refused if there was none."""
        if self._run is None:
            raise MisconfigurationException("Federation: run is missing; it exists after fit, test or predict.")
        return self._run

    @property
    def run_dir(self) -> Path:
        """Folder of the last run, ``default_root_dir/name/version_N``."""
        return self.run.folder

    @property
    def results(self) -> dict[str, Evaluation]:
        """The final evaluation of every evaluated phase of the last run, by name."""
        return self.run.results

    @property
    def settings(self) -> Settings:
        """What a run takes from here."""
        return Settings(
            phases=self.phases,
            starts=self.starts,
            trainer=self.trainer,
            backend=self.backend,
            callbacks=self.callbacks,
            seed=self.seed,
            evaluate_every_n_rounds=self.evaluate_every_n_rounds,
            evaluation_cohort_size=self.evaluation_cohort_size,
            enable_checkpointing=self.enable_checkpointing,
            hparams=self.hparams,
            folder=self.runs,
            failures=self.failures,
            metrics=self.metrics,
        )

    def client_module(self, method: str, client: int | str) -> ClientModule:  # pyright: ignore[reportInvalidTypeVarUse]
        """A client's personalized model after the last run; to type checkers a mixture, or what a variable says."""
        return cast(ClientModule, self.run.client_module(method, client))

    def fit(
        self,
        model: LightningModule,
        datamodule: FederatedDataModule,
        ckpt_path: str | None = None,
        allow_changes: str | list[str] | None = None,
    ) -> dict[str, Evaluation]:
        """Runs all phases on the clients of the data module.

        Args:
            model: the initial model; it is not changed.
            datamodule: the data and the clients that hold them.
            ckpt_path: checkpoint of a run to resume; the result is the same, bit for bit, as without the interruption.
                ``last`` is the newest checkpoint of this experiment.
            allow_changes: keys of the configuration, in a list or separated by commas, that may differ from those of
                the resumed run although its result depends on them; a key allows all keys below it.

        Returns:
            The final evaluation of every evaluated phase, by name.

        Raises:
            MisconfigurationException: before any training, if model, data, phases and trainer do not fit together, or
                the run to resume does not fit them, or another process trains it.
        """
        self.failures.check_thread()
        ckpt_path = ckpt_path or requeued(self.runs, self.command)
        return self._fit(model, datamodule, ckpt_path, keys_of(allow_changes))

    def personalize(
        self, model: LightningModule, datamodule: FederatedDataModule, ckpt_path: str = LAST, rounds: int = 10
    ) -> dict[str, Evaluation]:
        """Makes personalized models for new clients, from the federation's checkpoint and the new clients' data.

        The results of federated phases come from the checkpoint. In local rounds, which leave the server's state
        unchanged, the new clients train the parameters that are not shared, and the others are frozen, unless the phase
        is evaluated after local training. They also run the phases in which clients train alone; ``min_clients`` and
        ``dropout`` of ``failures`` do not apply. As in the federation,
        a client's architecture follows from its id, and images are normalized and words numbered in the same way. These
        runs are in the folder ``new_clients`` beside the federation's; in loggers that were given, ``new_clients/``
        precedes their names.

        Args:
            model: the federation's model.
            datamodule: the new clients and their data.
            ckpt_path: the federation's checkpoint; ``last`` is the newest of this experiment.
            rounds: local rounds of a federated phase whose clients keep parameters; it is evaluated after the last one.

        Returns:
            The final evaluation of every evaluated phase, on the new clients, by name.

        Raises:
            MisconfigurationException: before any training, if model, data, checkpoint and phases do not fit together.
        """
        self.failures.check_thread()
        path = find_checkpoint(ckpt_path, self.runs)
        phases = phases_of_new_clients(self.phases, path, rounds)
        runs, initial = self.runs / "new_clients", set_up_new_clients(datamodule, path, phases, self.seed)
        # new clients do not wait for one another, and dropout is an experiment of the federation's
        failures = replace(self.failures, min_clients=None, dropout=0.0)
        settings = replace(self.settings, phases=phases, folder=runs, failures=failures, evaluation_cohort_size=None)
        run = self._make_run(model, datamodule, settings, None, initial, read_result_for_new_clients)
        return self._run_phases(run, runs, below="new_clients/")

    def validate(self, model: LightningModule, datamodule: FederatedDataModule, ckpt_path: str = LAST) -> None:
        """Prints accuracy and metrics of every client's model on its validation samples, from a checkpoint."""
        set_up_as_saved(datamodule, find_checkpoint(ckpt_path, self.runs), self.phases, self.seed)
        if not len(datamodule.validation_samples.indices):
            fraction = datamodule.validation_fraction
            raise InvalidArgumentError(datamodule, "validation_fraction", fraction, "above 0", "no client validates")
        print(format_validation(evaluate_all(self._resume(model, datamodule, ckpt_path))))

    def test(self, model: LightningModule, datamodule: FederatedDataModule, ckpt_path: str = LAST) -> None:
        """Prints the table of test accuracies of every client's model, from a checkpoint.

        The training samples must be those of the run. The test samples may be others, and a phase may have another
        gate without tensors, or evaluation point: what differs is named.
        """
        evaluations = evaluate_all(run := self._resume(model, datamodule, ckpt_path))
        print(format_table(evaluations) + run.other_test_set)

    def predict(self, model: LightningModule, datamodule: FederatedDataModule, ckpt_path: str = LAST) -> None:
        """Writes predictions of every client's model to ``predictions.csv``, on its own or the global test samples."""
        print(write_predictions(self._resume(model, datamodule, ckpt_path)))

    def export(
        self, model: LightningModule, datamodule: FederatedDataModule, ckpt_path: str = LAST, **choices: Any
    ) -> None:
        """Writes clients' models, with their gates, to files.

        Args:
            model: the model of the run's configuration.
            datamodule: the data of the run's configuration.
            ckpt_path: checkpoint of the run; ``last`` is the newest of this experiment.
            **choices: ``method``, ``client``, ``format`` and ``output``, as in ``export_clients``.
        """
        print(export_clients(self._resume(model, datamodule, ckpt_path), **choices))

    def serve(
        self,
        model: LightningModule,
        datamodule: FederatedDataModule,
        num_clients: int,
        address: str = DEFAULT_ADDRESS,
        keys: str | None = None,
        insecure: bool = False,
        ckpt_path: str | None = None,
    ) -> dict[str, Evaluation]:
        """Runs all phases with clients on other machines, which ``join``; needs the extra ``flower``.

        Args:
            model: the initial model; it is not changed.
            datamodule: as in the clients' configuration; its data are not read.
            num_clients: number of clients, whose ids count from 0; the first round begins when all have joined.
            address: host and port to listen on: 0.0.0.0 where other machines connect, else 127.0.0.1.
            keys: the server's folder of ``fedmoe provision``: its certificate and key, and the clients' public keys;
                needed where other machines can connect.
            insecure: listen without certificates and keys where other machines can connect.
            ckpt_path: checkpoint of a run to continue; ``last`` is the newest of this experiment.

        Returns:
            The final evaluation of every evaluated phase, by name.

        Raises:
            MisconfigurationException: before anything starts, if an argument is wrong or a phase cannot be deployed;
                before any training, if clients do not fit together.
        """
        return run_server(self, model, datamodule, num_clients, address, keys, insecure, ckpt_path)

    def join(
        self,
        model: LightningModule,
        datamodule: FederatedDataModule,
        client: int,
        address: str = DEFAULT_ADDRESS,
        keys: str | None = None,
        insecure: bool = False,
    ) -> None:
        """Takes part in a federation on another machine, as one of its clients, until it ends.

        Args:
            model: the initial model; it is not changed.
            datamodule: the client's own data; all training samples are its own.
            client: the client's id, from 0.
            address: host and port of the server.
            keys: the client's folder of ``fedmoe provision``: the authority's certificate, and its own private key.
            insecure: connect to another machine without certificates and keys.

        Raises:
            MisconfigurationException: if an argument is wrong, or the server refuses the client.
        """
        run_client(self, model, datamodule, client, address, keys, insecure)

    def partition(self, model: LightningModule, datamodule: FederatedDataModule) -> None:
        """Prints how the samples are divided among the clients, and draws it to ``partition.png``."""
        set_up(datamodule, self.phases, self.seed)
        print(write_partition(datamodule, self.runs / "partition.png"))

    def audit(self, model: LightningModule, datamodule: FederatedDataModule) -> dict[str, PhaseAudit]:
        """Prints what would leave the clients in each phase, what stays with them, and who sees it; trains nothing.

        Returns:
            What the text says of each phase, by name.
        """
        audits = audit_run(self._make_run(model, datamodule), self.reports)
        self._run = None
        print(format_audit(audits, datamodule))
        return {audit.phase.name: audit for audit in audits}

    def check(self, model: LightningModule, datamodule: FederatedDataModule) -> None:
        """Makes all checks of :meth:`fit`, and refuses what it refuses; trains nothing."""
        plan_phases(self._make_run(model, datamodule))
        self._run = None

    def fit_on_server(
        self,
        model: LightningModule,
        datamodule: FederatedDataModule,
        ckpt_path: str | None,
        settings: Settings,
    ) -> dict[str, Evaluation]:
        """Runs all phases on clients that are not in this process, with settings that are made of the federation's."""
        trainer = {**self.trainer, "accelerator": "cpu", "devices": 1, "strategy": "auto"}  # nothing is trained here
        return self._fit(model, datamodule, ckpt_path, [], replace(settings, trainer=trainer))

    def run_of_client(self, model: LightningModule, datamodule: FederatedDataModule, folder: Path) -> Run:
        """A run that has not begun, for a client of a deployed federation on its own machine; with all checks."""
        settings = replace(self.settings, folder=folder, callbacks=[], evaluation_cohort_size=None)
        return self._make_run(model, datamodule, settings)

    def _fit(
        self,
        model: LightningModule,
        datamodule: FederatedDataModule,
        ckpt_path: str | None,
        allowed: list[str],
        settings: Settings | None = None,
    ) -> dict[str, Evaluation]:
        if not ckpt_path:
            run = self._make_run(model, datamodule, settings)
            return self._run_phases(run, self.runs, self.command)
        checkpoint = find_checkpoint(ckpt_path, self.runs)
        with locked(checkpoint):
            run = self._resume(model, datamodule, ckpt_path, allowed, settings)
            return self._run_phases(run, None, self.command, checkpoint)

    def _resume(
        self,
        model: LightningModule,
        datamodule: FederatedDataModule,
        ckpt_path: str,
        allowed: list[str] | None = None,
        settings: Settings | None = None,
    ) -> Run:
        """The run of a checkpoint, in the state in which it was saved; ``allowed`` as in ``check_configuration``."""
        checkpoint = find_checkpoint(ckpt_path, self.runs)
        own_client = set_up_as_saved(datamodule, checkpoint, self.phases, self.seed)
        identity = identify(self.seed, datamodule)
        test_set = None if allowed is not None else identity.pop("test_set")
        content = load_run(checkpoint, self.phases, identity)
        check_configuration(checkpoint, content, self.phases, configuration(self, model, datamodule), allowed)
        saved = Saved(states=content["phases"], rows=content["rows"], writer=content["writer"], only_client=own_client)
        settings = replace(settings or self.settings, folder=checkpoint.parent.parent)
        run = self._make_run(model, datamodule, settings, saved, content["models"])
        if test_set not in (None, content["test_set"]):
            run.other_test_set = name_of_test_set(datamodule, test_set)
        if allowed is None:
            for phase in (each for each in run.phases if each.name in run.states):
                run.states[phase.name] = with_gate_of(phase, run.module(phase), run.states[phase.name])
        return run

    def _make_run(
        self,
        model: LightningModule,
        datamodule: FederatedDataModule,
        settings: Settings | None = None,
        saved: Saved | None = None,
        initial: Mapping[str, Tree] | None = None,
        read_result: ReadResult = read_result,
    ) -> Run:
        self._run = None  # frees what it holds on a GPU
        settings = settings or self.settings
        check_made(self, "model", model)
        set_up(datamodule, settings.phases, self.seed)
        log_partition(datamodule)
        described = configuration(self, model, datamodule), recorded(self, model, datamodule)
        self._run = make_run(model, datamodule, settings, saved or Saved(), initial or {}, read_result, *described)
        return self._run

    def _run_phases(
        self,
        run: Run,
        runs: Path | None,
        command: str | None = None,
        checkpoint: Path | None = None,
        below: str = "",
    ) -> dict[str, Evaluation]:
        """Runs all phases, in a folder in ``runs`` if it is new; see ``interruptible`` and ``open_run``."""
        with interruptible(run, self.runs, command), open_run(run, runs, checkpoint, self.logger, below):
            fit(run)
        return run.results


def _are_all(items: Any, kind: type) -> bool:
    return isinstance(items, list | tuple) and all(isinstance(item, kind) for item in items)
