"""Trains a group of clients in one Trainer, all in one of its training steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from fedmoe_pl.algorithms.client import Client, Update
from fedmoe_pl.backends.client import (
    begin_client,
    client_batches,
    end_client,
    finite_updates,
    on_device,
    trainable_names,
)
from fedmoe_pl.backends.failures import Failure, guarded
from fedmoe_pl.backends.features import FeatureCache, LookedUpBatches, looked_up
from fedmoe_pl.backends.fitting import OneStep, discard, fit
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.backends.optimizers import optimizer_and_scheduler, optimizer_state
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.trees import Tree, copy_module


def train_clients(
    training: LocalTraining,
    server: Tree,
    clients: Sequence[int],
    kept: Mapping[int, Tree],
    round: int,
    features: FeatureCache,
) -> dict[int, Update | Failure]:
    """Trains clients one after another in one Trainer."""
    group = _Group(training, server, kept, round, features)
    no_clipping = {"gradient_clip_val": None, "gradient_clip_algorithm": None}  # manual optimization refuses to clip
    discard(fit(training, group, OneStep([*clients]), None, [], len(clients), max_epochs=1, **no_clipping))
    return finite_updates(training, group.updates)


class _Group(LightningModule):
    """A group as a LightningModule, whose training step trains all clients, one after another.

    The clients of one architecture use one module in turn, because a copy takes longer than a small client's training.
    """

    def __init__(
        self, training: LocalTraining, server: Tree, kept: Mapping[int, Tree], round: int, features: FeatureCache
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.training_of_phase = training
        self.server = server
        self.kept = kept
        self.round = round
        self.features = features
        self.updates: dict[int, Update | Failure] = {}
        self.reused: dict[int, _Reused] = {}  # by architecture; not registered, since each client is placed by itself

    def configure_optimizers(self) -> None:
        """None here: every client has its own."""

    def training_step(self, clients: Sequence[int], batch_idx: int) -> None:
        """Trains the clients; of all that they do, only their losses have the Trainer's precision."""
        training = self.training_of_phase
        with torch.autocast(training.device.type, enabled=False) if training.in_half_precision else nullcontext():
            for client_id in clients:
                update = guarded(partial(self._train_client, client_id), training.client_timeout)
                if isinstance(update, Failure):  # it may have left the module in any state
                    self.reused.pop(training.architecture(client_id), None)
                self.updates[client_id] = update

    def _train_client(self, client_id: int) -> Update:
        """One client's part of a round."""
        training = self.training_of_phase.of(client_id)
        architecture = training.architecture(client_id)
        if architecture not in self.reused:
            self.reused[architecture] = _Reused(training, self.round)
        reused = self.reused[architecture]
        module = reused.fresh()
        client, constants, samples = begin_client(training, module, self.server, client_id, self.kept, self.round)
        optimizer: Tree = {}
        if len(samples) and reused.is_trained:
            optimizer = self._train(reused, client, constants, samples)
        return end_client(training, client, constants, optimizer, is_checked_later=True)

    def _train(self, reused: _Reused, client: Client, constants: dict[str, Any], samples: Tensor) -> Tree:
        """Trains a client; returns the state of its optimizer, if clients keep it."""
        training, module = reused.training, client.module
        placed = on_device(constants, training.device)
        features = self.features.find(training, client, placed, samples)
        batches = client_batches(training, client, samples)
        on_cpu = training.device.type == "cpu"  # where a move to the device takes time and does nothing
        if not on_cpu:
            module.to(training.device)
        loop = _Loop(reused, client, placed, self.trainer, self._clip)
        if features is None:
            optimizer = loop.run(batches)
        else:
            lookup: Tree = {}
            with looked_up(module, features.parts.names, lookup):
                optimizer = loop.run(LookedUpBatches(batches, features, lookup))
        module.zero_grad()
        if not on_cpu:
            module.cpu()
        return optimizer_state(module.named_parameters(), optimizer) if training.keep_optimizer else {}

    def _clip(self, optimizer: torch.optim.Optimizer) -> None:
        arguments = self.training_of_phase.trainer
        clip_val = arguments.get("gradient_clip_val")
        if clip_val is not None:
            self.clip_gradients(optimizer, clip_val, arguments.get("gradient_clip_algorithm"))


class _Reused:
    """A module that clients of one architecture use in turn.

    Attributes:
        freezing: freezes the parameters that are not trained.
        is_trained: whether any parameter is trained in the round.
    """

    def __init__(self, training: LocalTraining, round: int) -> None:
        self.training = training
        self.module = copy_module(training.module)
        self.freezing = Freezing(training, self.module, round)
        self.is_trained = bool(trainable_names(training, self.module, round))
        self._tensors = self._of_module()
        self._fresh = {**dict(training.module.named_buffers()), **training.initial}
        self._modes = [(part, part.training) for part in self.module.modules()]

    def fresh(self) -> LightningModule:
        """The module as a new copy of the phase's module would be."""
        self.freezing.reset()
        for part, mode in self._modes:
            part.training = mode
        if self.training.device.type != "cpu":
            self._tensors = self._of_module()  # others, since the module was on the device
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                tensor.copy_(self._fresh[name])
        return self.module

    def _of_module(self) -> Tree:
        return {**dict(self.module.named_buffers()), **self.module.state_dict()}


class _Loop:
    """A client's epochs as a bare loop; to the client's module, it looks like the module's Trainer."""

    def __init__(
        self,
        reused: _Reused,
        client: Client,
        constants: dict[str, Any],
        trainer: Trainer,
        clip: Callable[[torch.optim.Optimizer], None],
    ) -> None:
        self.algorithm = reused.training.algorithm
        self.device_type = reused.training.device.type
        self.is_mixed = reused.training.in_half_precision
        self.freezing = reused.freezing
        self.client = client
        self.constants = constants
        self.trainer = trainer
        self.clip = clip
        self.current_epoch = 0
        self.max_epochs = reused.freezing.epochs

    @property
    def global_step(self) -> int:
        """The client's steps so far."""
        return self.client.steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.trainer, name)

    def run(self, batches: Any) -> torch.optim.Optimizer:
        """Trains all epochs; returns the optimizer."""
        client, module, freezing = self.client, self.client.module, self.freezing
        optimizer, scheduler = optimizer_and_scheduler(module.configure_optimizers())
        assert optimizer is not None, "needs_every_batch has refused it"
        module.trainer = self  # pyright: ignore[reportAttributeAccessIssue]
        for epoch in range(self.max_epochs):
            self.current_epoch = epoch
            freezing.freeze(epoch)
            for batch in batches:
                optimizer.zero_grad()
                with torch.autocast(self.device_type, torch.bfloat16) if self.is_mixed else nullcontext():
                    loss = client.see_loss(self.algorithm.client_loss(module, batch, self.constants)[0])
                loss.backward()
                self.clip(optimizer)
                optimizer.step()
                client.steps += 1
                if self.is_mixed:
                    torch.clear_autocast_cache()  # it holds half-precision copies of the parameters before the step
            if scheduler is not None:
                scheduler.step()
            freezing.unfreeze()
        module.trainer = None
        return optimizer
