"""Loggers and folders of the clients' own Trainers, each named by phase, client and round."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger

from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.backends.training import LocalTraining


class SilentLogger(DummyLogger):
    """Lightning's logger that writes nothing, for training whose logs are discarded; can be copied and pickled."""

    def __deepcopy__(self, memo: Any) -> SilentLogger:
        return self

    def __reduce__(self) -> tuple[type[SilentLogger], tuple[()]]:
        return SilentLogger, ()


class EpochMeans(LearningRateMonitor, SilentLogger):
    """A logger and callback of a client's Trainer that keeps each epoch's mean of every metric and learning rate."""

    def __init__(self) -> None:
        SilentLogger.__init__(self)
        LearningRateMonitor.__init__(self, "epoch")
        self._logged: list[dict[str, list[float]]] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # pyright: ignore
        """Begins an epoch and records its learning rates."""
        self._logged.append({})
        super().on_train_epoch_start(trainer, pl_module)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:  # pyright: ignore
        """Records what the Trainer's steps have logged."""
        for name, value in metrics.items() if self._logged else ():
            if name != "epoch":
                self._logged[-1].setdefault(name, []).append(float(value))

    @property
    def epochs(self) -> list[dict[str, float]]:
        """The means of each epoch."""
        return [{name: sum(values) / len(values) for name, values in epoch.items()} for epoch in self._logged]


def client_name(training: LocalTraining, client: Client) -> str:
    """The name of a client's training in one round, such as ``FedAvg/client_003/round_0012``; rounds count from 1."""
    name = training.datamodule.client_names.file(client.id)
    return f"{training.phase_name}/{name}/round_{client.round + 1:04d}"


def client_folder(training: LocalTraining, client: Client) -> str:
    """A client Trainer's ``default_root_dir``, where checkpoint callbacks and profilers write if there is no logger."""
    root = training.trainer.get("default_root_dir") or os.getcwd()
    return os.path.join(root, training.run_name, client_name(training, client))


def client_loggers(training: LocalTraining, client: Client) -> list[Logger]:
    """Copies of the loggers in the Trainer's arguments, named by :func:`client_name` for one client and round.

    There is none for ``logger: true``: what clients log then goes only to the run's loggers.
    For TensorBoard and CSV, the name becomes a folder below the logger's ``version`` or, without one, below a folder
    named after the run, so that no two runs log to the same files. For MLflow and Weights & Biases, it becomes the name
    of the run. If the federation itself logs to Weights & Biases in this process, clients log to its run, with their
    names as prefixes of the metrics, and write checkpoints to their folders. Other loggers keep their names.
    """
    given, name, folder = training.trainer.get("logger"), client_name(training, client), client_folder(training, client)
    return [
        _renamed(logger, name, training.run_name, folder)
        for logger in (given if isinstance(given, list | tuple) else [given])
        if isinstance(logger, Logger)
    ]


def _renamed(logger: Logger, name: str, run: str, folder: str) -> Logger:
    """A renamed copy of a logger that has not logged yet; Lightning has no public way to rename a logger."""
    if isinstance(logger, WandbLogger):  # `copy` would open its run
        import wandb  # pyright: ignore[reportMissingImports]  optional

        renamed = object.__new__(type(logger))
        vars(renamed).update(vars(logger), _wandb_init={**logger._wandb_init, "name": name}, _name=name)
        if wandb.run is not None:  # a process can have only one run
            renamed._experiment = wandb.run
            renamed._prefix = f"{name}/{logger._prefix}".rstrip("/")
            renamed._save_dir = folder  # where checkpoint callbacks write; all clients have the run's id
            setattr(renamed, "LOGGER_JOIN_CHAR", "/")  # noqa: B010  typed as a constant
        return renamed
    logger = copy.deepcopy(logger)
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        version = logger._version
        folder = run if version is None else version if isinstance(version, str) else f"version_{version}"
        logger._version = os.path.join(folder, name)
    elif isinstance(logger, MLFlowLogger):
        logger._run_name = name
    return logger


def finish(loggers: list[Logger]) -> None:
    """Ends the clients' own Weights & Biases runs, because the next client would continue an open one."""
    for logger in loggers:
        if isinstance(logger, WandbLogger) and getattr(logger.experiment, "name", None) == logger._name:
            logger.experiment.finish()
