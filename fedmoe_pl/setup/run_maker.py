"""Makes the runs of a federation, and fits them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger
from torchmetrics import Metric

from fedmoe_pl.backends import Backend
from fedmoe_pl.checkpoints.checkpoint import find_checkpoint
from fedmoe_pl.checkpoints.client_store import Store
from fedmoe_pl.checkpoints.configuration import configuration
from fedmoe_pl.checkpoints.lock import locked
from fedmoe_pl.checkpoints.resume import check_configuration, identify, load_run
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.own_client import add_clients
from fedmoe_pl.data.partitioners.given import AllToOne
from fedmoe_pl.evaluation.evaluation import Evaluation
from fedmoe_pl.evaluation.outputs import ClientModule
from fedmoe_pl.phases.failures import ClientFailures
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.phases.starts import Start
from fedmoe_pl.rounds.interruption import interruptible
from fedmoe_pl.rounds.loop import fit
from fedmoe_pl.rounds.run import FederationCallback, Run
from fedmoe_pl.setup.check_trainer import check_trainer
from fedmoe_pl.setup.data import set_up
from fedmoe_pl.setup.own_client import OwnClient
from fedmoe_pl.setup.start import make_run, open_run, store_of


class RunMaker:
    """The part of a federation that makes runs with its settings, which are the attributes of ``Federation``."""

    phases: list[Phase]
    starts: dict[str, Start]
    trainer: dict[str, Any]
    backend: Backend
    evaluate_every_n_rounds: int
    evaluation_clients: int | None
    callbacks: list[FederationCallback]
    logger: bool | Logger | list[Logger]
    runs: Path
    enable_checkpointing: bool
    store: Literal["memory", "disk"]
    seed: int
    failures: ClientFailures
    metrics: dict[str, Metric]
    hparams: dict[str, Any]
    command: str
    _run: Run | None = None

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

    def client_module(self, method: str, client: int) -> ClientModule:  # pyright: ignore[reportInvalidTypeVarUse]
        """A client's personalized model after the last run; to type checkers a mixture, or what a variable says."""
        return cast(ClientModule, self.run.client_module(method, client))

    def fit_on_server(
        self,
        model: LightningModule,
        datamodule: FederatedDataModule,
        ckpt_path: str | None,
        make_store: Callable[[Run], Store],
        **attributes: Any,
    ) -> dict[str, Evaluation]:
        """Runs all phases on clients that are not in this process, as the server of a deployed federation does.

        Args:
            model: the initial model.
            datamodule: stands for the clients' data.
            ckpt_path: checkpoint of a run to continue; None for a new run.
            make_store: makes the store.
            attributes: attributes of the run that replace the federation's, such as its backend.

        Returns:
            The final evaluation of every evaluated phase, by name.
        """
        trainer = {**self.trainer, "accelerator": "cpu", "devices": 1}  # nothing is trained here
        return self._fit_new_or_resumed(model, datamodule, ckpt_path, [], make_store, trainer=trainer, **attributes)

    def run_of_client(self, model: LightningModule, datamodule: FederatedDataModule, folder: Path) -> Run:
        """A run that has not begun, for a client of a deployed federation on its own machine; with all checks."""
        return self._set_up(model, datamodule, self.phases, folder, callbacks=[])

    def _fit_new_or_resumed(
        self,
        model: LightningModule,
        datamodule: FederatedDataModule,
        ckpt_path: str | None,
        allowed: list[str],
        make_store: Callable[[Run], Store] | None = None,
        **attributes: Any,
    ) -> dict[str, Evaluation]:
        """Runs all phases, from a checkpoint if there is one; arguments as in :meth:`fit_on_server`."""
        others = {"evaluation_clients": self.evaluation_clients, **attributes}
        if ckpt_path:
            checkpoint = find_checkpoint(ckpt_path, self.runs)
            with locked(checkpoint):
                run = self._resume(model, datamodule, ckpt_path, allowed, **others)
                return self._fit(run, checkpoint=checkpoint, command=self.command, make_store=make_store)
        run = self._set_up(model, datamodule, self.phases, self.runs, **others)
        return self._fit(run, self.runs, self.command, make_store=make_store)

    def _resume(
        self,
        model: LightningModule,
        datamodule: FederatedDataModule,
        ckpt_path: str,
        allowed: list[str] | None = None,
        **attributes: Any,
    ) -> Run:
        """The run of a checkpoint, in the state in which it was saved; ``allowed`` as in ``check_configuration``."""
        checkpoint = find_checkpoint(ckpt_path, self.runs)
        attributes = {**self._set_up_data(datamodule, checkpoint), **attributes}
        content = load_run(checkpoint, self.phases, identify(self.seed, datamodule))
        check_configuration(checkpoint, content, self.phases, configuration(self, model, datamodule), allowed)
        others = {"initial": content["models"], "states": content["phases"], "rows": content["rows"]}
        others |= {"writer": content["writer"], "evaluation_clients": self.evaluation_clients, **attributes}
        return self._set_up(model, datamodule, self.phases, checkpoint.parent.parent, **others)

    def _set_up_data(self, datamodule: FederatedDataModule, checkpoint: Path) -> dict[str, Any]:
        """Sets up the data for a checkpoint's run, and returns what is special in a run of a single client."""
        own = OwnClient.read(checkpoint)
        if own is not None and not datamodule.is_set_up:
            datamodule.partitioner = AllToOne(own.id)
        set_up(datamodule, self.phases, self.seed)
        if own is None:
            return {}
        add_clients(datamodule, own.num_clients, own.num_classes)
        return {"only_client": own.id}

    def _set_up(
        self, model: LightningModule, datamodule: FederatedDataModule, phases: list[Phase], folder: Path, **others: Any
    ) -> Run:
        """Makes a run with the federation's settings, and all its checks; ``others`` are arguments of ``make_run``."""
        self._run = None  # frees what it holds on a GPU
        set_up(datamodule, phases, self.seed)
        settings: dict[str, Any] = {
            "phases": phases,
            "starts": self.starts,
            "trainer": self.trainer,
            "backend": self.backend,
            "callbacks": self.callbacks,
            "seed": self.seed,
            "evaluate_every_n_rounds": self.evaluate_every_n_rounds,
            "enable_checkpointing": self.enable_checkpointing,
            "hparams": self.hparams,
            "configuration": configuration(self, model, datamodule),
            "folder": folder,
            "failures": self.failures,
            "metrics": self.metrics,
            **others,
        }
        self._run = make_run(model, datamodule, devices=check_trainer(settings["trainer"]), **settings)
        return self._run

    def _fit(
        self,
        run: Run,
        runs: Path | None = None,
        command: str | None = None,
        checkpoint: Path | None = None,
        make_store: Callable[[Run], Store] | None = None,
    ) -> dict[str, Evaluation]:
        """Runs all phases, in a folder in ``runs`` if it is new; ``command`` as in :func:`interruptible`."""
        make_store = make_store or partial(store_of, self.store)
        with interruptible(run, self.runs, command), open_run(run, runs, checkpoint, make_store, self.logger):
            fit(run)
        return run.results
