"""Checks of the arguments of clients' Trainers."""

from __future__ import annotations

import copy
import difflib
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.callbacks import DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, Timer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities import rank_zero_warn

from fedmoe_pl.backends import LEAN_TRAINER, quiet, trains_by_loss
from fedmoe_pl.backends.best_epoch import BestEpoch
from fedmoe_pl.backends.hooks import shown
from fedmoe_pl.backends.training import epochs_to_try
from fedmoe_pl.checks import MOST_COUNTED, is_finite
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.phases.phase import Phase

_PROCESSES_PER_CORE = 8


def _is_integer(value: Any, lowest: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= lowest


def _is_share(value: Any, lowest: int) -> bool:
    """Whether the value is a number of batches, or a share of them; the lowest is 1 or 0 batches."""
    return _is_integer(value, lowest) or (isinstance(value, float) and 0 <= value <= 1 and (value > 0 or lowest == 0))


# What Lightning accepts although no client can be trained with it: whether a value is allowed, and which ones are.
_RULES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "max_epochs": (
        lambda value: _is_integer(value, 0) and value <= MOST_COUNTED,
        f"the number of local epochs, at least 0 and at most {MOST_COUNTED:,}",
    ),
    "max_steps": (lambda value: _is_integer(value, 1) or value == -1, "at least 1, or -1 for no limit"),
    "accumulate_grad_batches": (
        lambda value: _is_integer(value, 1) and value <= MOST_COUNTED,
        f"at least 1 and at most {MOST_COUNTED:,}",
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
        lambda value: value is None or _is_share(value, 1),
        "a number of batches of at least 1, or a share of them above 0 and at most 1.0",
    ),
    **dict.fromkeys(
        ("limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches"),
        (lambda value: value is None or _is_share(value, 0), "a number of batches, or a share of them from 0 to 1.0"),
    ),
    **dict.fromkeys(
        ("min_epochs", "min_steps", "log_every_n_steps", "reload_dataloaders_every_n_epochs"),
        (lambda value: value is None or _is_integer(value, 0), "at least 0"),
    ),
    "check_val_every_n_epoch": (lambda value: value is None or _is_integer(value, 1), "at least 1"),
    "num_nodes": (
        lambda value: value == 1,
        "1: a client trains on one device; RayBackend trains clients on several machines",
    ),
}


def check_trainer(arguments: dict[str, Any]) -> list[torch.device]:
    """Refuses arguments from which a client's Trainer cannot be made.

    Returns:
        The devices to train on, one for each client that is trained at the same time. A CPU is repeated; with
        ``devices: auto`` there is one entry for every core that the process may use.

    Raises:
        MisconfigurationException: if Lightning does not know or refuses the arguments, or they ask for several nodes or
            a true precision other than 32 bits.
    """
    known = inspect.signature(Trainer).parameters
    for name in arguments:
        if name not in known:
            similar = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {similar[0]}?" if similar else "."
            raise MisconfigurationException(f"trainer.{name} is not an argument of Trainer{hint}")
    for name, (is_allowed, allowed) in _RULES.items():
        if name in arguments and not is_allowed(arguments[name]):
            raise MisconfigurationException(f"trainer.{name} is {arguments[name]}, but must be {allowed}.")
    trainer, devices = _trainer_and_devices(arguments)
    _check_timers(arguments, trainer)
    if trainer.strategy.root_device.type != devices[0].type:
        strategy = arguments["strategy"]
        raise MisconfigurationException(
            f"trainer.strategy is {strategy if isinstance(strategy, str) else type(strategy).__name__}, but must be "
            f"auto, because this one trains on {trainer.strategy.root_device.type}, not on {devices[0].type}."
        )
    most = _PROCESSES_PER_CORE * len(os.sched_getaffinity(0))
    if isinstance(trainer.accelerator, CPUAccelerator) and len(devices) > most:
        raise MisconfigurationException(
            f"trainer.devices is {arguments['devices']}, but must be at most {most}, "
            f"{_PROCESSES_PER_CORE} for each CPU core that this process may use."
        )
    if trainer.precision.endswith("-true") and trainer.precision != "32-true":
        raise MisconfigurationException(
            f"trainer.precision is '{trainer.precision}', but must be 32-true or mixed, because clients and server "
            "exchange parameters of the model's own type; call .double() on the model for 64 bits."
        )
    return devices


def _check_timers(arguments: dict[str, Any], trainer: Trainer) -> None:
    """Refuses a duration of 0, after which a client would stop before it has trained."""
    timers = [
        callback
        for callback in trainer.callbacks  # pyright: ignore[reportAttributeAccessIssue]
        if isinstance(callback, Timer)
    ]
    remaining = [timer.time_remaining() for timer in timers]  # None without a limit
    if any(seconds is not None and seconds <= 0 for seconds in remaining):
        if arguments.get("max_time") is not None:
            raise MisconfigurationException(f"trainer.max_time is {arguments['max_time']}, but must be above 0.")
        raise MisconfigurationException("trainer.callbacks has a Timer whose duration is 0, but must be above 0.")


def _trainer_and_devices(arguments: dict[str, Any]) -> tuple[Trainer, list[torch.device]]:
    """A client's Trainer, and the devices for clients that are trained at the same time.

    Raises:
        MisconfigurationException: if Lightning refuses the arguments; the message names one without which it does not.
    """
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
            raise MisconfigurationException(
                f"trainer.{name} is {shown(arguments[name])}, but must be one that Lightning accepts: {reason}"
            ) from error
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


def check_client_trainer(
    phase: Phase, module: LightningModule, trainer: dict[str, Any], datamodule: FederatedDataModule
) -> None:
    """Refuses arguments that have no effect or a wrong one on the clients' training.

    These are arguments of a training of 0 epochs, early stopping by what no client logs, and callbacks that miss a
    logger.

    Args:
        phase: the phase.
        module: the phase's module.
        trainer: arguments of its clients' Trainers.
        datamodule: the data and the clients that hold them; already set up.

    Raises:
        MisconfigurationException: if there is such an argument or such a callback.
    """
    for name in ("batch_size", "optimizer", "lr_scheduler", "callbacks", "trainer"):
        if not trainer["max_epochs"] and getattr(phase, name) is not None:
            raise MisconfigurationException(f"{phase}: {name} is given, but must be left out, because max_epochs is 0.")
    if trainer["max_epochs"]:
        _check_loggers(phase, trainer)
        _check_stopping(phase, module, trainer, datamodule)


def _callbacks(trainer: dict[str, Any]) -> list[Any]:
    callbacks = trainer.get("callbacks") or []
    return callbacks if isinstance(callbacks, list) else [callbacks]


def _check_loggers(phase: Phase, trainer: dict[str, Any]) -> None:
    """Refuses callbacks that log, if the clients have no logger."""
    needing = [each for each in _callbacks(trainer) if isinstance(each, LearningRateMonitor | DeviceStatsMonitor)]
    if needing and not trainer.get("logger"):
        raise MisconfigurationException(
            f"{phase}: trainer.logger is {trainer.get('logger')}, but must be a logger, because the clients have the "
            f"callback {type(needing[0]).__name__}; federation.logger is not theirs."
        )


def _check_stopping(
    phase: Phase, module: LightningModule, trainer: dict[str, Any], datamodule: FederatedDataModule
) -> None:
    """Refuses early stopping by a metric that certainly no client logs; arguments as of ``check_client_trainer``."""
    callbacks = _callbacks(trainer)
    # a module with its own steps and other callbacks may log anything, also in training
    only_loss = trains_by_loss(phase.algorithm, module) and all(
        type(callback) in (EarlyStopping, BestEpoch) for callback in callbacks
    )
    for callback in callbacks:
        is_certain = isinstance(callback, EarlyStopping) and (only_loss or isinstance(callback, BestEpoch))
        if not is_certain or not callback.strict:
            continue
        where = "callbacks" if callback in (phase.callbacks or []) else "trainer.callbacks"
        name = type(callback).__name__
        prefix = f"{phase}: {where} has {'an' if name[0] in 'AEIOU' else 'a'} {name} with monitor '{callback.monitor}'"
        needed = "trainer.limit_val_batches, such as 1.0, and the data's validation_fraction must be above 0"
        if not trainer["limit_val_batches"]:
            raise MisconfigurationException(
                f"{prefix}, but trainer.limit_val_batches is {trainer['limit_val_batches']}, so that no client "
                f"validates; {needed}."
            )
        if not len(datamodule.validation_samples.indices):
            raise MisconfigurationException(
                f"{prefix}, but validation_fraction is 0, so that no client has validation samples; {needed}."
            )
        if only_loss and callback.monitor != "validation_loss":
            raise MisconfigurationException(
                f"{prefix}, but monitor must be validation_loss, which is all that clients log for it."
            )


def check_trained(phase: Phase, module: LightningModule, max_epochs: int) -> None:
    """Refuses arguments of the clients' training in a phase that trains no parameter, and one that trains in vain.

    Training is in vain if clients share parameters, but train only others, because of too few epochs or rounds.

    Args:
        phase: the phase.
        module: the phase's module.
        max_epochs: local epochs of a client in a round.

    Raises:
        MisconfigurationException: if there is such an argument, or no shared parameter is trained.
    """
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
    is_trained = some_are_trained(parameters)
    shared = [name for name, _ in module.named_parameters() if is_shared(name)]
    to_train = [name for name in parameters if name in shared]
    if is_trained and shared and not phase.ckpt_path and not some_are_trained(to_train):
        raise MisconfigurationException(
            f"{phase}: max_epochs is {max_epochs}, but must be higher or other parameters be shared, because "
            f"{type(phase.algorithm).__name__} trains none of the shared ones, such as '{shared[0]}', in any epoch."
        )
    names = ("batch_size", "optimizer", "lr_scheduler", "round_lr_scheduler", "keep_optimizer", "callbacks", "trainer")
    given = [name for name in names if getattr(phase, name) not in (None, False)]
    if given and not is_trained:
        reason = "its model has no parameter that it trains" if max_epochs else "max_epochs is 0"
        raise MisconfigurationException(f"{phase}: {given[0]} is given, but must be left out, because {reason}.")
