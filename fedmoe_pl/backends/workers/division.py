"""Decides whether the batches of a phase's clients can be divided among processes, by trial steps of some clients."""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import Optimizer

from fedmoe_pl.backends.fitting import LEAN_TRAINER, fit
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.backends.local_client import begin_client, on_device
from fedmoe_pl.backends.rounding import in_full_precision, is_close, largest_value
from fedmoe_pl.backends.trainer import algorithm_steps
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.trees import Tree, copy_module

_SAMPLES = 7  # odd, so that the parts differ in size


@in_full_precision()
def check_division(training: LocalTraining) -> None:
    """Refuses a loss that is not the mean over the samples of a batch: DDP averages gradients of its parts.

    One client of each architecture computes a step with a whole batch and with both of its parts, without dropout and
    statistics of the batch, which are others in a part; in eval mode, if the step still draws random numbers. What
    fails here fails in training, which says so.
    """
    because = ""
    if not training.module.automatic_optimization:
        because = f"{type(training.module).__name__} optimizes manually"
    for clients in training.by_architecture(range(training.datamodule.num_clients)):
        try:
            because = because or _problem(training.of(clients[0]), clients)
        except MisconfigurationException:
            raise
        except Exception:
            continue
    if because:
        strategy = training.trainer["strategy"]
        raise InvalidArgumentError("Trainer", "trainer.strategy", strategy, "left out", because)


def _problem(training: LocalTraining, clients: list[int]) -> str:
    """Why the batches of clients cannot be divided; empty if they can."""
    sizes = training.datamodule.train_samples.sizes
    client = max(clients, key=lambda client: int(sizes[client]))
    number = min(int(sizes[client]), _SAMPLES, training.batch_size or training.datamodule.batch_size)
    half = number // 2
    for moment in training.trainable.values() if half else ():
        parts = (slice(number), slice(half), slice(half, number))
        steps = [_step(training, client, moment, part, train=True) for part in parts]
        if any(step.is_random for step in steps):
            steps = [_step(training, client, moment, part, train=False) for part in parts]
        whole, first, second = (step.gradients for step in steps)
        largest = largest_value(whole.values())
        for name, gradient in whole.items():
            parts = [share * part[name] for share, part in ((half, first), (number - half, second)) if name in part]
            if not is_close(sum(parts[1:], parts[0]) / number if parts else None, gradient, largest):
                return f"the loss of a batch is not the mean over its samples (by the gradient of '{name}')"
    return ""


def _step(training: LocalTraining, client_id: int, moment: tuple[int, int], part: slice, train: bool) -> _Step:
    """A client's step, in a round and an epoch, with a part of its samples."""
    arguments = {**LEAN_TRAINER, "accelerator": training.trainer.get("accelerator", "auto")}
    training = replace(training, trainer=arguments, devices=())
    round, epoch = moment
    server, module = training.algorithm.server_init(training.module), copy_module(training.module)
    client, constants, samples = begin_client(training, module, server, client_id, {}, round)
    batches = training.datamodule.batches(samples[part], batch_size=len(samples), device=training.device)
    step = _Step(Freezing(training, module, round), epoch, train)
    with algorithm_steps(training, client, on_device(constants, training.device)) as fitted:
        fit(training, fitted, batches, None, [step])
    return step


class _Step(Callback):
    """Notes the gradients of the only step, and whether it draws random numbers."""

    def __init__(self, freezing: Freezing, epoch: int, train: bool) -> None:
        self.freezing = freezing
        self.epoch = epoch
        self.train = train
        self.gradients: Tree = {}
        self.is_random = False
        self._generators: list[bytes] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for config in trainer.lr_scheduler_configs:
            config.frequency = 2  # not stepped: the trial validates nothing that a scheduler could follow
        self.freezing.freeze(self.epoch)
        pl_module.train(self.train)
        for part in pl_module.modules():
            if isinstance(part, (_DropoutNd, _BatchNorm)):
                part.eval()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._generators = _generators(pl_module)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        self.gradients = {
            name: parameter.grad.detach().clone()
            for name, parameter, _ in self.freezing.parameters
            if parameter.grad is not None
        }
        self.is_random = self._generators != _generators(pl_module)


def _generators(module: LightningModule) -> list[bytes]:
    """The states of the global generators, from which a step may draw."""
    on_gpu = [torch.cuda.get_rng_state(module.device)] if module.device.type == "cuda" else []
    others = pickle.dumps((random.getstate(), np.random.get_state()))
    return [*(bytes(state.numpy()) for state in (torch.get_rng_state(), *on_gpu)), others]
