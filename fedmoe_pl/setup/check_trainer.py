"""Checks of the arguments of clients' Trainers."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import EarlyStopping, Timer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn

from fedmoe_pl.backends import LEAN_TRAINER, quiet, trains_by_loss
from fedmoe_pl.backends.best_epoch import BestEpoch
from fedmoe_pl.backends.training import epochs_to_try
from fedmoe_pl.checks import MOST_COUNTED, InvalidArgumentError, is_finite
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.phases.phase import Phase

_PROCESSES_PER_CORE = 8


def _is_integer(value: Any, lowest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


# What Lightning accepts although no client can be trained with it: whether a value is allowed, and which ones are.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_epochs": (
        lambda value: _is_integer(value, 0) and value <= MOST_COUNTED,
        f"the number of local epochs, an integer from 0 to {MOST_COUNTED:,}",
    ),
    "max_steps": (lambda value: _is_integer(value, 1) or value == -1, "at least 1, or -1 for no limit"),
    "accumulate_grad_batches": (
        lambda value: _is_integer(value, 1) and value <= MOST_COUNTED,
        f"an integer from 1 to {MOST_COUNTED:,}",
    ),
    "gradient_clip_val": (
        lambda value: value is None or (is_finite(value) and value >= 0),
        "a finite number of at least 0",
    ),
    "strategy": (
        lambda value: value in ("auto", "single_device") or isinstance(value, SingleDeviceStrategy),
        "auto, because a client trains on one device",
    ),
    "limit_train_batches": (
        lambda value: value is None or _is_integer(value, 1) or (isinstance(value, float) and 0 < value <= 1),
        "a number of batches of at least 1, or a share of them above 0 and at most 1.0",
    ),
    "check_val_every_n_epoch": (lambda value: value is None or _is_integer(value, 1), "at least 1"),
    "num_nodes": (
        lambda value: value == 1,
        "1: a client trains on one device; RayBackend trains clients on several machines",
    ),
}


def check_trainer(arguments: dict[str, Any], owner: str = "Trainer") -> list[torch.device]:
    """Refuses arguments from which no client's Trainer can be made; gives a device for each client trained at a time.

    A CPU is repeated; with ``devices: auto`` there is an entry for every core that the process may use.
    """
    for name, (is_allowed, allowed) in _RULES.items():
        if name in arguments and not is_allowed(arguments[name]):
            raise InvalidArgumentError(owner, f"trainer.{name}", arguments[name], allowed)
    trainer, devices = _trainer_and_devices(owner, arguments)
    timers = [each for each in trainer.callbacks if isinstance(each, Timer)]  # pyright: ignore[reportAttributeAccessIssue]
    if any(seconds is not None and seconds <= 0 for seconds in (timer.time_remaining() for timer in timers)):
        name = "callbacks" if arguments.get("max_time") is None else "max_time"
        raise InvalidArgumentError(owner, f"trainer.{name}", arguments[name], "a duration above 0")
    if trainer.strategy.root_device.type != devices[0].type:
        because = f"this one trains on {trainer.strategy.root_device.type}, not on {devices[0].type}"
        raise InvalidArgumentError(owner, "trainer.strategy", arguments["strategy"], "auto", because)
    most = _PROCESSES_PER_CORE * len(os.sched_getaffinity(0))
    if isinstance(trainer.accelerator, CPUAccelerator) and len(devices) > most:
        because = f"{_PROCESSES_PER_CORE} clients may be trained at the same time on each CPU core of this process"
        raise InvalidArgumentError(owner, "trainer.devices", arguments["devices"], f"at most {most}", because)
    if trainer.precision.endswith("-true") and trainer.precision != "32-true":
        because = "clients and server exchange parameters of the model's own type; .double() of the model gives 64 bits"
        raise InvalidArgumentError(owner, "trainer.precision", trainer.precision, "32-true or mixed", because)
    return devices


def _trainer_and_devices(owner: str, arguments: dict[str, Any]) -> tuple[Trainer, list[torch.device]]:
    """A client's Trainer, and the devices; if Lightning refuses the arguments, one without which it does not."""
    try:
        return _made(arguments)
    except Exception as error:  # whatever Lightning raises
        reason = " ".join(str(error).split())
        given_first = sorted(arguments, key=lambda name: arguments[name] != LEAN_TRAINER.get(name, ...), reverse=True)
        for name in given_first:
            try:
                _made({other: arguments[other] for other in arguments if other != name})
            except Exception:  # another argument is wrong
                continue
            allowed = f"one that Lightning accepts ({reason})"
            raise InvalidArgumentError(owner, f"trainer.{name}", arguments[name], allowed) from error
        raise MisconfigurationException(f"trainer: {reason}") from error


def _made(arguments: dict[str, Any]) -> tuple[Trainer, list[torch.device]]:
    devices = arguments.get("devices", "auto")
    with quiet():
        copied = copy.deepcopy({name: value for name, value in arguments.items() if name != "logger"})
        logger = {"logger": arguments["logger"]} if "logger" in arguments else {}  # a copy of WandbLogger opens its run
        trainer = Trainer(**{**copied, **logger, "devices": 1})  # it changes a strategy that it is given
        accelerator = trainer.accelerator
        if devices == "auto":
            cores = len(os.sched_getaffinity(0))
            devices = cores if isinstance(accelerator, CPUAccelerator) else accelerator.auto_device_count()
        parsed = accelerator.parse_devices(devices)
        if isinstance(accelerator, CPUAccelerator) and parsed > 2**16:  # the list of them would fill the memory
            parsed = 2**16
        return trainer, accelerator.get_parallel_devices(parsed)


def check_stopping(
    phase: Phase, module: LightningModule, trainer: dict[str, Any], datamodule: FederatedDataModule
) -> None:
    """Refuses early stopping that would never stop, because no client validates and nothing else logs its metric."""
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    # a module with its own steps and other callbacks may log anything, also in training
    only_loss = trains_by_loss(phase.algorithm, module) and all(
        type(callback) in (EarlyStopping, BestEpoch) for callback in callbacks
    )
    for callback in callbacks if trainer["max_epochs"] else []:
        is_certain = isinstance(callback, EarlyStopping) and (only_loss or isinstance(callback, BestEpoch))
        if not is_certain or not callback.strict:
            continue
        because = f"{type(callback).__name__} stops by what clients validate"
        if not trainer["limit_val_batches"]:
            value = trainer["limit_val_batches"]
            raise InvalidArgumentError(str(phase), "trainer.limit_val_batches", value, "above 0, such as 1.0", because)
        if not len(datamodule.validation_samples.indices):
            fraction = datamodule.validation_fraction
            raise InvalidArgumentError(datamodule, "validation_fraction", fraction, "above 0", because)


def check_trained(phase: Phase, module: LightningModule, max_epochs: int) -> None:
    """Refuses a phase that trains in vain: not one of the shared parameters, because of too few epochs or rounds."""
    algorithm, is_shared = phase.algorithm, phase.algorithm.is_shared
    parameters = [name for name, parameter in module.named_parameters() if parameter.requires_grad]

    def some_are_trained(names: list[str]) -> bool:
        epochs, all_known = epochs_to_try(algorithm, range(phase.rounds), max_epochs)
        return any(algorithm.is_trainable(name, *epoch) for epoch in epochs for name in names) or not all_known

    if not epochs_to_try(algorithm, range(phase.rounds), max_epochs)[1] and not phase.ckpt_path:
        rank_zero_warn(
            f"{phase}: rounds is {phase.rounds} and max_epochs is {max_epochs}, too many to know what "
            f"{type(algorithm).__name__} never trains; such parts are in train mode and computed in every step."
        )
    shared = [name for name, _ in module.named_parameters() if is_shared(name)]
    to_train = [name for name in parameters if name in shared]
    in_vain = shared and some_are_trained(parameters) and not some_are_trained(to_train)
    if in_vain and not phase.ckpt_path:
        because = f"{type(algorithm).__name__} trains none of the shared parameters, such as '{shared[0]}'"
        raise InvalidArgumentError(str(phase), "max_epochs", max_epochs, "higher, or other parameters shared", because)
