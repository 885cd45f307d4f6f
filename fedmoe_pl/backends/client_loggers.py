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
    """Lightning's logger of nothing, for training that is forgotten; it can also be copied, and sent to a worker."""

    def __deepcopy__(self, memo: Any) -> SilentLogger:
        return self

    def __reduce__(self) -> tuple[type[SilentLogger], tuple[()]]:
        return SilentLogger, ()


class EpochMeans(LearningRateMonitor, SilentLogger):
    """A logger and callback of a client's Trainer that keeps the mean of each metric and rate of every epoch."""

    def __init__(self) -> None:
        SilentLogger.__init__(self)
        LearningRateMonitor.__init__(self, "epoch")
        self._logged: list[dict[str, list[float]]] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # pyright: ignore
        """Begins an epoch, with its learning rates."""
        self._logged.append({})
        super().on_train_epoch_start(trainer, pl_module)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:  # pyright: ignore
        """Called by the Trainer with what steps have logged."""
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
    return f"{training.phase}/{name}/round_{client.round + 1:04d}"


def client_folder(training: LocalTraining, client: Client) -> str:
    """The ``default_root_dir`` of its Trainer, in which a ``ModelCheckpoint`` and a profiler write without a logger."""
    root = training.trainer.get("default_root_dir") or os.getcwd()
    return os.path.join(root, training.run, client_name(training, client))


def client_loggers(training: LocalTraining, client: Client) -> list[Logger]:
    """Copies of the loggers in the Trainer's arguments for one client's training in one round.

    There is none for ``logger: true``: what clients log then goes to the run's loggers alone.
    In TensorBoard and CSV files, that is a folder below the logger's own or, if it has no ``version``, below one in it
    with the end of the run's path: another run must not log to the same files. In MLflow and Weights & Biases, it is
    the name of the run. If the federation itself logs to Weights & Biases in this process, clients log to its run, and
    their names come before those of the metrics. Other loggers keep the name that they have.
    """
    given, name = training.trainer.get("logger"), client_name(training, client)
    return [
        _renamed(logger, name, training.run)
        for logger in (given if isinstance(given, list | tuple) else [given])
        if isinstance(logger, Logger)
    ]


def _renamed(logger: Logger, name: str, run: str) -> Logger:
    """A copy of a logger that has not logged yet; Lightning's have no public way to be named after they are made."""
    if isinstance(logger, WandbLogger):  # a copy by `copy` would open its run
        import wandb  # pyright: ignore[reportMissingImports]  optional

        renamed = object.__new__(type(logger))
        vars(renamed).update(vars(logger), _wandb_init={**logger._wandb_init, "name": name}, _name=name)
        if wandb.run is not None:  # one process has one run
            renamed._experiment = wandb.run
            renamed._prefix = f"{name}/{logger._prefix}".rstrip("/")
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
    """Ends the clients' own runs of Weights & Biases, because the next client would go on with one that is open."""
    for logger in loggers:
        if isinstance(logger, WandbLogger) and getattr(logger.experiment, "name", None) == logger._name:
            logger.experiment.finish()
