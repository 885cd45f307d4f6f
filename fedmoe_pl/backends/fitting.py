"""Fits a module with a Lightning Trainer."""

from __future__ import annotations

import copy
import inspect
import logging
import os
import signal
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities import registry
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Timer

from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.checks import reason_of
from fedmoe_pl.data import FederatedDataModule, SampleBatches

LEAN_TRAINER: dict[str, Any] = {
    "max_epochs": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
}
"""Defaults for a client's Trainer. Loggers, progress bars and checkpoints are off; the federation has its own."""
TRAINER_DEFAULTS: dict[str, Any] = {
    name: parameter.default for name, parameter in inspect.signature(Trainer).parameters.items()
}
"""Lightning's defaults, passed to every Trainer so that none comes from the environment (``PL_TRAINER_MAX_STEPS``)."""
_entry_points = cache(entry_points)


def fit(
    training: LocalTraining,
    module: LightningModule,
    batches: Iterable[Any],
    validation: SampleBatches | None,
    callbacks: list[Callback],
    **arguments: Any,
) -> Trainer:
    """Fits a module with a new Trainer, whose construction takes a few milliseconds."""
    # copying a WandbLogger would open its run
    copied = copy.deepcopy({name: value for name, value in training.trainer.items() if name != "logger"})
    settings: dict[str, Any] = {**TRAINER_DEFAULTS, **copied, "logger": False, **arguments}
    settings["callbacks"] = [*callbacks, *listed(settings, "callbacks")]
    devices = training.devices or [training.device]
    settings["devices"] = [device.index or 0 for device in devices] if training.device.type == "cuda" else len(devices)
    if training.devices:
        # otherwise Lightning would read ranks from a cluster's environment, such as Slurm's
        settings["plugins"] = [*listed(settings, "plugins"), LightningEnvironment()]
        if settings["strategy"] == "ddp":  # experts may get no samples, and parts are frozen in some epochs
            settings["strategy"] = "ddp_find_unused_parameters_true"
    with quiet():
        with packages_read_once():
            trainer = Trainer(**settings)
        if settings["profiler"]:
            profiler: Any = trainer.profiler  # pyright: ignore[reportAttributeAccessIssue]
            profiler.filename = getattr(profiler, "filename", None) or "profile"  # a file: `quiet` suppresses prints
            if trainer.loggers and trainer.loggers[0].save_dir is None:  # then Lightning knows no folder for the file
                profiler.dirpath = profiler.dirpath or settings["default_root_dir"]
        trainer.datamodule = _without_hooks(training.datamodule)  # pyright: ignore[reportAttributeAccessIssue]
        try:
            trainer.fit(module, batches, validation)
        except (MisconfigurationException, RuntimeError) as error:
            if training.validates or not _waits_for_metric(trainer):
                raise
            reason = reason_of(error).partition(". ")[0]
            raise MisconfigurationException(
                f"Phase '{training.phase_name}': {reason}; clients validate, and log what they validate, only with "
                "trainer.limit_val_batches above 0, such as 1.0, and a validation_fraction of the data above 0."
            ) from error
        except SystemExit as exit:
            if not trainer.interrupted:
                raise
            signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning has set it to be ignored
            raise KeyboardInterrupt from exit
    return trainer


def _waits_for_metric(trainer: Trainer) -> bool:
    """Whether all batches of an epoch are done, and a scheduler or EarlyStopping needs a metric that nobody logged."""
    schedulers = [each for each in trainer.lr_scheduler_configs if each.reduce_on_plateau]
    waiting = [each.monitor for each in (*schedulers, *trainer.early_stopping_callbacks) if each.strict]
    return trainer.is_last_batch and any(name not in trainer.callback_metrics for name in waiting)


def has_limit(trainer: Mapping[str, Any]) -> bool:
    """Whether steps or time of each training are limited, so that it may end before its last epoch."""
    may_end = any(trainer.get(name) not in (None, -1, False) for name in ("max_steps", "max_time", "fast_dev_run"))
    return may_end or any(isinstance(each, Timer) for each in listed(trainer, "callbacks"))


def listed(trainer: Mapping[str, Any], name: str) -> list[Any]:
    """A Trainer argument that may be a list or a single object, as a list."""
    value = trainer.get(name) or []
    return value if isinstance(value, list) else [value]


def _without_hooks(datamodule: FederatedDataModule) -> FederatedDataModule:
    """The data module for a client's Trainer, without its hooks, which were called once before the first round."""
    shown = copy.copy(datamodule)
    for hook in ("prepare_data", "setup", "teardown", "on_exception"):
        setattr(shown, hook, lambda *arguments, **named: None)
    shown._log_hyperparams = False
    return shown


@contextmanager
def packages_read_once() -> Iterator[None]:
    """Spares each Trainer a search of all installed packages for callbacks: more than half of its construction time."""
    looked_up = getattr(registry, "entry_points", None)
    if looked_up is entry_points:  # private to Lightning, so a release may remove it
        setattr(registry, "entry_points", _entry_points)  # noqa: B010  not declared
    try:
        yield
    finally:
        setattr(registry, "entry_points", looked_up)  # noqa: B010


def discard(trainer: Trainer) -> None:
    """Frees what a finished Trainer holds, such as gradients; in reference cycles, it would be freed late."""
    vars(trainer).clear()


def cores_of_process() -> list[int]:
    """The cores that this process may use; all cores of the machine where the system cannot tell."""
    known = hasattr(os, "sched_getaffinity")
    return sorted(os.sched_getaffinity(0)) if known else [*range(os.cpu_count() or 1)]


@contextmanager
def one_thread() -> Iterator[None]:
    """In this context, PyTorch computes with one CPU thread.

    Small models gain little from more threads, and threads stall when another process occupies a core. With one
    thread, results do not depend on the machine's number of cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses what Lightning prints in every fit, such as "GPU available: ..."."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # a client without validation samples is not a mistake
            warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")
            # the clients that share a Trainer have their own optimizers
            warnings.filterwarnings("ignore", "`LightningModule.configure_optimizers` returned `None`")
            # the run has warned about this once; every client's Trainer would repeat it
            warnings.filterwarnings("ignore", "Found \\d+ module\\(s\\) in eval mode")
            # whether parameters are unused differs from phase to phase and batch to batch
            warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
            # each process validates all samples
            warnings.filterwarnings("ignore", "It is recommended to use .* when logging on epoch level in distributed")
            # the user has chosen the CPU; every client's Trainer would repeat this
            warnings.filterwarnings("ignore", "GPU available but not used")
            # every client's Trainer with a logger would repeat this in every round
            warnings.filterwarnings("ignore", "The number of training batches \\(\\d+\\) is smaller than the logging")
            # lightning 2.6 with torch 2.14 and newer; users cannot fix it
            warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)` is deprecated")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
