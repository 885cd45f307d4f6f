"""Checks of Trainer arguments, by themselves and against the clients' samples."""

from __future__ import annotations

import copy
import difflib
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateFinder,
    LearningRateMonitor,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.lr_scheduler import ReduceLROnPlateau

from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.backends import overridden_hooks, packages_read_once, quiet
from fedmoe_pl.backends.best_epoch import BestEpoch
from fedmoe_pl.backends.fitting import TRAINER_DEFAULTS, cores_of_process, has_limit, listed
from fedmoe_pl.backends.workers.fork_server import FORKS
from fedmoe_pl.checks import InvalidArgumentError, check_at_least, reason_of, shown, tried
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.client_samples import ClientSamples
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.models.layers import has_batch_norm
from fedmoe_pl.phases.participation import cohort_of
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import Run

_AVERAGES = (StochasticWeightAveraging, WeightAveraging)  # callbacks that average parameters over several steps
_PROCESSES_PER_CORE = 8
_LEFT_OUT = {
    "overfit_batches": "every epoch would draw other batches; limit_train_batches limits their number",
    "limit_test_batches": "evaluations are of all samples",
    "limit_predict_batches": "predictions are of all samples",
}
_OF_KIND = {
    "callbacks": (Callback, "Callbacks"),
    "logger": (Logger | bool, "Loggers, true or false"),
    "profiler": (Profiler | str, "a Profiler or the name of one"),
}
_KNOWN = ("fedmoe_pl.", "lightning.")  # code outside these packages may log any metric


def check_trainer(arguments: dict[str, Any], phase: Phase | None = None) -> list[torch.device]:
    """Refuses Trainer arguments that no client can have; returns the device of each process that trains clients.

    The arguments are those of all phases, or of one.

    The CPU appears once per process; with ``devices: auto``, once per core that this process may use. Where processes
    cannot be forked, there is one device.
    """
    owner, key = "Trainer" if phase is None else str(phase), partial(_key, phase)
    for name in (name for name in arguments if name not in TRAINER_DEFAULTS):
        similar = difflib.get_close_matches(name, TRAINER_DEFAULTS, n=1)
        because = f"it is not an argument of Trainer{f' ({similar[0]} is)' if similar else ''}"
        raise InvalidArgumentError(owner, key(name), arguments[name], "left out", because)
    _check_values(arguments, owner, key)
    if arguments["max_epochs"] is None:
        raise InvalidArgumentError(owner, "trainer.max_epochs", None, "the number of local epochs")
    check_at_least(owner, "trainer.max_epochs", arguments["max_epochs"], 0)
    check_at_least(owner, key("accumulate_grad_batches"), arguments.get("accumulate_grad_batches"), 1)
    for name, because in _LEFT_OUT.items():
        value = arguments.get(name)
        is_all = isinstance(value, float) and value == 1  # an integer 1 is one batch
        if value not in (None, TRAINER_DEFAULTS[name]) and not is_all:
            raise InvalidArgumentError(owner, key(name), value, "left out", because)
    if SLURMEnvironment.detect() and (tasks := os.environ["SLURM_NTASKS"]) != "1":
        because = "one process starts those that train clients; --cpus-per-task gives it cores"
        raise InvalidArgumentError("SLURM", "--ntasks", int(tasks), "1", because)
    given = "trainer" if phase is None else f"{phase}: train.{'trainer' if phase.train.trainer else 'callbacks'}"
    with quiet(), packages_read_once(), tried(given):
        trainer = _trainer_with(arguments, owner, key)
        seconds = Timer(arguments.get("max_time")).time_remaining()
        stops = {"max_time": seconds is not None and seconds <= 0}
        stops |= {name: arguments.get(name) == 0 for name in ("limit_train_batches", "max_steps")}
        for name in (name for name, at_once in stops.items() if at_once and arguments["max_epochs"]):
            because = "no client would train; max_epochs: 0 is for phases that train nothing"
            raise InvalidArgumentError(owner, key(name), arguments[name], "above 0, or left out", because)
        accelerator, cores = trainer.accelerator, len(cores_of_process())
        devices = arguments.get("devices", "auto")
        if devices == "auto" and not FORKS:
            devices = 1
        elif devices == "auto":
            devices = cores if isinstance(accelerator, CPUAccelerator) else accelerator.auto_device_count()
        try:
            parsed = accelerator.parse_devices(devices)
        except Exception as error:  # anything that Lightning or an accelerator's library may raise
            because = reason_of(error)
            raise InvalidArgumentError(owner, key("devices"), devices, "what a Trainer accepts", because) from error
    if isinstance(accelerator, CPUAccelerator) and parsed > (most := _PROCESSES_PER_CORE * cores):
        because = f"a CPU core of this process trains at most {_PROCESSES_PER_CORE} clients at the same time"
        raise InvalidArgumentError(owner, "trainer.devices", arguments["devices"], f"at most {most}", because)
    devices = accelerator.get_parallel_devices(parsed)
    if len(devices) > 1 and not FORKS:
        because = "clients are trained in several processes on Linux only"
        raise InvalidArgumentError(owner, key("devices"), arguments["devices"], "1 here", because)
    _check_strategy(trainer, arguments, owner, key)
    if trainer.precision.endswith("-true") and trainer.precision != "32-true":
        because = "clients and server exchange parameters of the model's own type; .double() of the model gives 64 bits"
        raise InvalidArgumentError(owner, key("precision"), trainer.precision, "32-true or mixed", because)
    return devices


def _key(phase: Phase | None, name: str) -> str:
    """The key of an argument of all Trainers, or of those of a phase that has arguments or callbacks of its own."""
    if phase is None:
        return f"trainer.{name}"
    return "train.callbacks" if name == "callbacks" and phase.train.callbacks else trainer_key(phase, name)


def _check_values(arguments: Mapping[str, Any], owner: str, key: Callable[[str], str]) -> None:
    """Refuses values that a Trainer accepts but cannot train with; in a file, ``train.trainer`` may hold anything."""
    for name, value in arguments.items():
        kind, allowed = _OF_KIND.get(name, (object, "an object"))
        for each in value if isinstance(value, list | tuple) else [value]:
            is_unmade = isinstance(each, Mapping) and "class_path" in each
            if is_unmade or not isinstance(each, kind | None):
                because = "its class_path is not the full import path of a class" if is_unmade else ""
                raise InvalidArgumentError(owner, key(name), value, allowed, because)
            if isinstance(each, float) and math.isnan(each):
                raise InvalidArgumentError(owner, key(name), value, "a number")


def _trainer_with(arguments: Mapping[str, Any], owner: str, key: Callable[[str], str]) -> Trainer:
    """Makes a Trainer for one device; if that fails, names the argument that fails by itself."""
    # copies, because a Trainer changes its strategy; copying a WandbLogger would open its run
    copied = {name: value if name == "logger" else copy.deepcopy(value) for name, value in arguments.items()}
    try:
        return Trainer(**{**TRAINER_DEFAULTS, **copied, "devices": 1})
    except Exception:
        # fails as well if the cause is not an argument but the environment, such as the number of SLURM's tasks
        Trainer(**{**TRAINER_DEFAULTS, "accelerator": "cpu", "devices": 1})
        # the accelerator first, because every other argument is tried together with it
        for name, value in sorted(copied.items(), key=lambda argument: argument[0] != "accelerator"):
            try:
                accelerator = copied.get("accelerator", "auto")
                Trainer(**{**TRAINER_DEFAULTS, "accelerator": accelerator, name: value, "devices": 1})
            except Exception as error:
                allowed = f"what a Trainer accepts{', such as auto or cpu' if name == 'accelerator' else ''}"
                raise InvalidArgumentError(owner, key(name), value, allowed, reason_of(error)) from error
        raise


def _check_strategy(trainer: Trainer, arguments: Mapping[str, Any], owner: str, key: Callable[[str], str]) -> None:
    """Refuses one checkpoint folder for all clients, several machines, and strategies that would change the result."""
    if trainer.num_nodes > 1:
        because = "a client trains on one machine; RayBackend trains clients on several machines"
        raise InvalidArgumentError(owner, key("num_nodes"), trainer.num_nodes, "left out", because)
    for callback in trainer.checkpoint_callbacks:
        if given := getattr(callback, "dirpath", None):
            because = "the files of all clients would be there; each client and round has a folder in default_root_dir"
            raise InvalidArgumentError(owner, f"{type(callback).__name__}.dirpath", given, "left out", because)
    strategy, given = trainer.strategy, arguments.get("strategy")
    is_plain_ddp = isinstance(strategy, DDPStrategy) and strategy._start_method == "popen"
    if not (is_plain_ddp or isinstance(strategy, SingleDeviceStrategy)):
        because = "each client's processes exist already, and each has a whole copy of the model"
        raise InvalidArgumentError(owner, key("strategy"), given, "ddp, or left out", because)


def epochs_of_all(trainer: Mapping[str, Any]) -> int:
    """The number of epochs that every client surely trains; at most 1 if something may end training early."""
    may_end = has_limit(trainer) or any(isinstance(each, EarlyStopping) for each in listed(trainer, "callbacks"))
    return min(trainer["max_epochs"], 1) if may_end else trainer["max_epochs"]


def check_loggers(of_run: Logger | Sequence[Logger] | bool, trainers: Iterable[Mapping[str, Any]]) -> None:
    """Refuses a logger that is the run's and the clients', whose copies would log into what the run's has opened.

    Copies of TensorBoard's and of Weights & Biases' log beside it.
    """
    given = [of_run, *(trainer.get("logger") for trainer in trainers)]
    own, *of_clients = [[*each] if isinstance(each, list | tuple) else [each] for each in given]
    given_to_clients = {id(each) for loggers in of_clients for each in loggers}
    for logger in (each for each in own if isinstance(each, Logger)):
        if id(logger) in given_to_clients and not isinstance(logger, TensorBoardLogger | WandbLogger):
            because = "clients would log into the files, or the run, that it opens"
            raise InvalidArgumentError("Federation", "logger", logger, "another object than trainer.logger", because)


def check_callbacks(run: Run, phase: Phase, module: LightningModule) -> None:
    """Refuses Lightning's callbacks that fail in the training of clients, or leave them with other tensors."""
    trainer = phase.client_trainer(run.trainer)
    callbacks = listed(trainer, "callbacks")
    for callback in callbacks:
        because = ""
        if isinstance(callback, LearningRateFinder | BatchSizeFinder):
            because = "each client would find another; tune a plain Trainer, or the federation by fedmoe tune"
        elif isinstance(callback, LearningRateMonitor | DeviceStatsMonitor) and not trainer.get("logger"):
            because = "clients have no logger without trainer.logger"
        elif isinstance(callback, _AVERAGES) and any(isinstance(each, BestEpoch) for each in callbacks):
            because = "BestEpoch restores the tensors of an epoch, not an average"
        elif isinstance(callback, StochasticWeightAveraging) and (name := _frozen_batch_norm(run, phase, module)):
            because = f"it would reset the statistics of '{name}', which is frozen, and not estimate them anew"
        if because:
            raise InvalidArgumentError(str(phase), "callbacks", type(callback).__name__, "left out", because)


def _frozen_batch_norm(run: Run, phase: Phase, module: LightningModule) -> str | None:
    """A layer of batch normalization that is in eval mode in an epoch of the phase, because it is not trained there."""
    if phase.algorithm.frozen_train_mode:
        return None
    trainer = phase.client_trainer(run.trainer)
    with_added = {**trainer, "max_epochs": trainer["max_epochs"] + 1}  # averaging adds an epoch for the statistics
    training = replace(run.local_training(phase, module, {}), trainer=with_added)
    frozen = {name for trained in training.trainable for name in training.parts_without(trained)}
    for name, part in module.named_modules():
        if isinstance(part, _BatchNorm) and any(f"{name}.".startswith(f"{each}.") for each in frozen):
            return name
    return None


def samples_of_clients(run: Run, phase: Phase, module: LightningModule) -> dict[int, Tensor]:
    """The samples on which each participant that has any trains in the first round; refuses what are no indices."""
    data, algorithm, seed = run.datamodule, phase.algorithm, run.seed
    participants = cohort_of(phase, data.num_clients, seed).participants
    clients = [
        Client(client, 0, seed, module, data.train_samples[client], {}, data, participants=participants)
        for client in participants
    ]
    # on the machine of a deployed federation's client, the others have none
    chosen: dict[int, Any] = {each.id: algorithm.client_samples(each) for each in clients if len(each.samples)}
    for each in chosen.values():
        if not isinstance(each, Tensor) or each.dim() != 1 or each.is_floating_point() or each.dtype is torch.bool:
            allowed = "one whose client_samples returns indices of samples, an int64 tensor of shape (n,)"
            raise InvalidArgumentError(str(phase), "algorithm", algorithm, allowed, f"it returns {shown(each)}")
    return chosen


def check_batches(run: Run, phase: Phase, module: LightningModule, train: Mapping[int, Tensor]) -> None:
    """Refuses shares of batches that leave a client none, and validation intervals that its epochs never reach."""
    datamodule, seed, trainer = run.datamodule, run.seed, phase.client_trainer(run.trainer)
    if trainer.get("fast_dev_run") or phase.algorithm.client_batches:
        return  # Lightning or the algorithm chooses the batches
    limits = [trainer.get(name) for name in ("limit_train_batches", "limit_val_batches")]
    of_validation = trainer.get("val_check_interval"), trainer.get("check_val_every_n_epoch")
    if not any(isinstance(limit, float) for limit in limits) and {*of_validation} <= {None, 1}:
        return
    held_out = phase.algorithm.opt_out.opted_in_of_all(datamodule.validation_samples, seed, validation=True)
    drop_single = has_batch_norm(module)
    fewest = {
        "limit_train_batches": _fewest_batches(datamodule, train, train, phase.train.batch_size, drop_single),
        "limit_val_batches": _fewest_batches(datamodule, train, held_out, datamodule.evaluated_at_once),
    }
    for name, (number, client) in fewest.items():
        limit = trainer.get(name)
        if isinstance(limit, float) and limit and number and not int(number * limit):
            allowed, because = "a larger share of batches, or their number", f"{client} has {number}, and none is left"
            raise InvalidArgumentError(str(phase), trainer_key(phase, name), limit, allowed, because)
    if not (trainer["limit_val_batches"] and len(datamodule.validation_samples.indices)):
        return
    epochs, name, (most, client) = "check_val_every_n_epoch", "val_check_interval", fewest["limit_train_batches"]
    check_at_least(str(phase), trainer_key(phase, epochs), trainer.get(epochs), 1)
    interval, limit = trainer.get(name), trainer.get("limit_train_batches")
    if limit is not None:
        most = int(most * limit) if isinstance(limit, float) else min(most, limit)
    is_share = isinstance(interval, float) and interval <= 1
    highest = math.inf if trainer.get(epochs, 1) is None else most  # None counts batches across epochs
    if most and isinstance(interval, int | float) and not is_share and not 1 <= interval <= highest:
        allowed, because = f"a share, or from 1 to {most}", f"{client} has that many batches in an epoch"
        raise InvalidArgumentError(str(phase), trainer_key(phase, name), interval, allowed, because)


def _fewest_batches(
    datamodule: FederatedDataModule,
    train: Mapping[int, Tensor],
    samples: Mapping[int, Tensor] | ClientSamples,
    batch_size: int | None,
    drop_single: bool = False,
) -> tuple[int, str]:
    """The client with the fewest samples, of those that train and have any: its number of batches, and its name."""
    clients = [client for client, trained in train.items() if len(trained) and len(samples[client])]
    if not clients:
        return 0, ""
    client = min(clients, key=lambda client: len(samples[client]))
    number = len(datamodule.batches(samples[client], batch_size, drop_single=drop_single))
    return number, f"client {datamodule.client_names[client]}"


def check_monitored(run: Run, phase: Phase, module: LightningModule) -> None:
    """Refuses early stopping and schedulers that follow a metric which the clients' training does not log."""
    datamodule, seed, trainer = run.datamodule, run.seed, phase.client_trainer(run.trainer)
    callbacks = listed(trainer, "callbacks")
    stopping = [each for each in callbacks if isinstance(each, EarlyStopping) and each.strict]
    is_known = all(type(each).__module__.startswith(_KNOWN) for each in (*callbacks, module, phase.algorithm))
    is_known = is_known and not any(isinstance(each, LambdaCallback) for each in callbacks)  # calls users' functions
    if is_known and trainer["max_epochs"] and isinstance(module, MixtureOfExperts) and not overridden_hooks(module):
        logged = ["validation_loss", *(["train_loss"] * bool(trainer["logger"]))]
        for each in (each for each in stopping if each.monitor not in logged):
            argument, because = f"{type(each).__name__}.monitor", "the training of clients logs no other metric"
            raise InvalidArgumentError(str(phase), argument, each.monitor, " or ".join(logged), because)
    names = [type(each).__name__ for each in stopping if each.monitor.startswith("validation")]
    if (scheduler := _plateau(module)) is not None:
        if getattr(scheduler, "monitor", None) != "validation_loss":
            key = "train.lr_scheduler" if phase.train.lr_scheduler is not None else "the model's lr_scheduler"
            allowed = "lightning.pytorch.cli.ReduceLROnPlateau(monitor='validation_loss') or one without a metric"
            because = "the training of clients logs no other metric"
            raise InvalidArgumentError(str(phase), key, "a ReduceLROnPlateau of another metric", allowed, because)
        names.append("ReduceLROnPlateau")
    if not (trainer["max_epochs"] and names):
        return
    because = f"{names[0]} follows what clients validate"
    if not trainer["limit_val_batches"]:
        value = trainer["limit_val_batches"]
        raise InvalidArgumentError(str(phase), "trainer.limit_val_batches", value, "above 0, such as 1.0", because)
    if not len(datamodule.validation_samples.indices):
        fraction = datamodule.validation_fraction
        raise InvalidArgumentError(datamodule, "validation_fraction", fraction, "above 0", because)
    if scheduler is None:
        return  # early stopping skips, or fails, only the clients that cannot validate
    opt_out = phase.algorithm.opt_out
    trained = opt_out.opted_in_of_all(datamodule.train_samples, seed).sizes > 0
    validated = opt_out.opted_in_of_all(datamodule.validation_samples, seed, validation=True).sizes > 0
    if len(without := (trained & ~validated).nonzero()):
        because = f"{because}, and client {datamodule.client_names[int(without[0])]} has no sample for it"
        raise InvalidArgumentError(datamodule, "validation_fraction", datamodule.validation_fraction, "larger", because)


def _plateau(module: LightningModule) -> ReduceLROnPlateau | None:
    """The scheduler of a mixture that the federation trains, if it follows a metric."""
    if not isinstance(module, MixtureOfExperts) or module.lr_scheduler is None or overridden_hooks(module):
        return None
    scheduler = module.lr_scheduler(module.optimizer(module.parameter_groups()))
    return scheduler if isinstance(scheduler, ReduceLROnPlateau) else None


def other_steps(phase: Phase, trainer: Mapping[str, Any]) -> str:
    """The key that keeps training from taking one plain step per batch; empty if there is none."""
    if trainer.get("accumulate_grad_batches", 1) != 1:
        return trainer_key(phase, "accumulate_grad_batches")
    for callback in listed(trainer, "callbacks"):
        accumulates = isinstance(callback, GradientAccumulationScheduler)
        if isinstance(callback, _AVERAGES) or (accumulates and callback.going_to_accumulate_grad_batches()):
            return "train.callbacks" if callback in (phase.train.callbacks or []) else trainer_key(phase, "callbacks")
    return ""


def trainer_key(phase: Phase, name: str) -> str:
    """The key under which an argument of a phase's Trainers is set."""
    return f"{'train.' if name in (phase.train.trainer or {}) else ''}trainer.{name}"
