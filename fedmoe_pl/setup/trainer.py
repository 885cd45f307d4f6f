"""The devices of clients' Trainers, and the Trainers that no client can have."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import SingleDeviceStrategy

from fedmoe_pl.backends import quiet
from fedmoe_pl.checks import InvalidArgumentError, check_at_least, tried

_PROCESSES_PER_CORE = 8


def check_trainer(arguments: dict[str, Any], owner: str = "Trainer") -> list[torch.device]:
    """Refuses arguments of a Trainer that no client can have; gives a device for each client trained at a time.

    A CPU is repeated; with ``devices: auto`` there is an entry for every core that the process may use.
    """
    if arguments["max_epochs"] is None:
        raise InvalidArgumentError(owner, "trainer.max_epochs", None, "the number of local epochs")
    check_at_least(owner, "trainer.max_epochs", arguments["max_epochs"], 0)
    with quiet(), tried("trainer" if owner == "Trainer" else f"{owner}: trainer"):
        copied = copy.deepcopy({name: value for name, value in arguments.items() if name != "logger"})
        logger = {"logger": arguments["logger"]} if "logger" in arguments else {}  # a copy of WandbLogger opens its run
        trainer = Trainer(**{**copied, **logger, "devices": 1})  # it changes a strategy that it is given
        accelerator, cores = trainer.accelerator, len(os.sched_getaffinity(0))
        devices = arguments.get("devices", "auto")
        if devices == "auto":
            devices = cores if isinstance(accelerator, CPUAccelerator) else accelerator.auto_device_count()
        parsed = accelerator.parse_devices(devices)
    if not isinstance(trainer.strategy, SingleDeviceStrategy):
        name = "strategy" if trainer.num_nodes == 1 else "num_nodes"
        because = "a client trains on one device; RayBackend trains clients on several machines"
        raise InvalidArgumentError(owner, f"trainer.{name}", arguments.get(name), "left out", because)
    if trainer.precision.endswith("-true") and trainer.precision != "32-true":
        because = "clients and server exchange parameters of the model's own type; .double() of the model gives 64 bits"
        raise InvalidArgumentError(owner, "trainer.precision", trainer.precision, "32-true or mixed", because)
    if isinstance(accelerator, CPUAccelerator) and parsed > (most := _PROCESSES_PER_CORE * cores):
        because = f"a CPU core of this process trains at most {_PROCESSES_PER_CORE} clients at the same time"
        raise InvalidArgumentError(owner, "trainer.devices", arguments["devices"], f"at most {most}", because)
    return accelerator.get_parallel_devices(parsed)
