"""Checks of the arguments of clients' Trainers."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator

from fedmoe_pl.backends import quiet
from fedmoe_pl.backends.best_epoch import BestEpoch
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.rounds.phase import Phase


def check_trainer(arguments: dict[str, Any]) -> list[torch.device]:
    """Refuses arguments from which a client's Trainer cannot be made.

    Returns:
        The devices to train on, one for each client that is trained at the same time. A CPU is repeated; with
        ``devices: auto`` there is one entry for every core that the process may use.

    Raises:
        MisconfigurationException: if Lightning refuses the arguments, or they ask for several nodes or a true precision
            other than 32 bits.
    """
    max_epochs, devices = arguments["max_epochs"], arguments.get("devices", "auto")
    if not isinstance(max_epochs, int) or max_epochs < 0:
        raise MisconfigurationException(
            f"trainer.max_epochs is {max_epochs}, but must be the number of local epochs, at least 0."
        )
    try:
        with quiet():
            trainer = Trainer(**{**arguments, "devices": 1})
            accelerator = trainer.accelerator
            if devices == "auto":
                cores = len(os.sched_getaffinity(0))
                devices = cores if isinstance(accelerator, CPUAccelerator) else accelerator.auto_device_count()
            parallel_devices = accelerator.get_parallel_devices(accelerator.parse_devices(devices))
    except (MisconfigurationException, TypeError, ValueError) as error:
        raise MisconfigurationException(f"trainer: {error}") from error
    if trainer.world_size > 1:
        raise MisconfigurationException(
            f"trainer.num_nodes is {trainer.num_nodes}, but must be 1: a client trains on one device; RayBackend "
            "trains clients on several machines."
        )
    if trainer.precision.endswith("-true") and trainer.precision != "32-true":
        raise MisconfigurationException(
            f"trainer.precision is '{trainer.precision}', but must be 32-true or mixed, because clients and server "
            "exchange parameters of the model's own type; call .double() on the model for 64 bits."
        )
    return parallel_devices


def check_client_trainer(phase: Phase, trainer: dict[str, Any], datamodule: FederatedDataModule) -> None:
    """Refuses arguments that have no effect or a wrong one on the clients' training.

    These are arguments of a training of 0 epochs, a ``BestEpoch`` if no client validates, and gradient clipping that
    would break an algorithm's formulas.

    Args:
        phase: the phase.
        trainer: arguments of its clients' Trainers.
        datamodule: the data and the clients that hold them; already set up.

    Raises:
        MisconfigurationException: if there is such an argument, such a callback or such clipping.
    """
    for name in ("batch_size", "optimizer", "lr_scheduler", "callbacks", "trainer"):
        if not trainer["max_epochs"] and getattr(phase, name) is not None:
            raise MisconfigurationException(f"{phase}: {name} is given, but must be left out, because max_epochs is 0.")
    if phase.algorithm.needs_plain_steps and trainer.get("gradient_clip_val"):
        raise MisconfigurationException(
            f"{phase}: gradient_clip_val of the trainer is {trainer['gradient_clip_val']}, "
            f"but must be left out, because {type(phase.algorithm).__name__} computes with the steps of plain SGD."
        )
    callbacks = trainer.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    if not any(isinstance(callback, BestEpoch) for callback in callbacks):
        return
    prefix = f"{phase}: callbacks has a BestEpoch"
    if not trainer["limit_val_batches"]:
        raise MisconfigurationException(
            f"{prefix}, but limit_val_batches of the phase's trainer is {trainer['limit_val_batches']}; it must be "
            "above 0, such as 1.0, so that clients validate."
        )
    if not len(datamodule.validation_samples.indices):
        raise MisconfigurationException(
            f"{prefix}, but validation_fraction is 0, so that no client has validation samples; it must be above 0."
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
    is_trainable, is_shared = phase.algorithm.is_trainable, phase.algorithm.is_shared
    parameters = [name for name, parameter in module.named_parameters() if parameter.requires_grad]

    def some_are_trained(names: list[str]) -> bool:
        epochs = ((round, epoch) for round in range(phase.rounds) for epoch in range(max_epochs))
        return any(is_trainable(name, *epoch) for epoch in epochs for name in names)

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
