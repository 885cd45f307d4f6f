"""Trains one client after another, each in its own Lightning Trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Client, Update
from fedmoe_pl.backends.backend import Backend, Chunk, GroupUpdate, Plan, group_size, group_update
from fedmoe_pl.backends.client import begin_client, client_batches, end_client, on_device, trainable_names
from fedmoe_pl.backends.client_loggers import client_loggers, finish
from fedmoe_pl.backends.failures import Failure, guarded
from fedmoe_pl.backends.features import FeatureCache, Features, LookedUpBatches
from fedmoe_pl.backends.fitting import discard, fit, one_thread
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.backends.frozen_parts import looked_up
from fedmoe_pl.backends.group import shares_trainer, train_clients
from fedmoe_pl.backends.hooks import trains_by_loss
from fedmoe_pl.backends.lean import EpochModule, fit_epochs, needs_every_batch
from fedmoe_pl.backends.optimizers import optimizer_state
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.data import batch_length
from fedmoe_pl.trees import Tree, copy_module

_MOST_GROUPS = 64  # so many that workers do not wait long for the last group
_SAMPLES_PER_TRAINER = 2000  # in all epochs; to make a Trainer takes as long as to train a few hundred


class TrainerBackend(Backend):
    """A ``Trainer`` per client and round, which small clients share.

    Each local epoch runs in one training step, under manual optimization. That gives the same bits, takes little longer
    than a bare loop, and computes the outputs of frozen parts only once. If something must see every batch (a per-batch
    callback, gradient accumulation, a logger, a plugin or a user's ``training_step``), each batch is a training step.
    """

    def plan(self, training: LocalTraining) -> TrainerPlan:
        """Decides whether each local epoch can run in one training step."""
        return TrainerPlan(training, type(self).__name__, needs_every_batch(training) is None)


class TrainerPlan(Plan):
    """The plan of :class:`TrainerBackend`.

    Args:
        training: the local training of the phase's clients.
        description: how the phase is trained, and why; for the log.
        lean: whether each local epoch runs in one training step.
    """

    def __init__(self, training: LocalTraining, description: str, lean: bool) -> None:
        super().__init__(training, description)
        self.lean = lean
        self.shares_trainer = lean and shares_trainer(training)
        self.features = FeatureCache()

    def __reduce__(self) -> tuple[type, tuple[LocalTraining, str, bool]]:
        """Leaves out the features when the plan is sent to another process."""
        return TrainerPlan, (self.training, self.description, self.lean)

    def begin(self, training: LocalTraining) -> TrainerPlan:
        """A plan with the same decision and no features yet."""
        return TrainerPlan(training, self.description, self.lean)

    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """One client per group; in a large cohort, at most 64 groups of neighbours."""
        size = -(-len(cohort) // _MOST_GROUPS)
        return [list(cohort[start : start + size]) for start in range(0, len(cohort), size)]

    def chunks(self, groups: Sequence[list[int]], at_least: int = 1) -> list[Chunk]:
        """Neighbours whose clients are small, so that one Trainer serves them."""
        if not self.shares_trainer:
            return super().chunks(groups)
        sizes = [self.training.max_epochs * group_size(self.training, group) for group in groups]
        most = min(_SAMPLES_PER_TRAINER, sum(sizes) // at_least)
        chunks: list[Chunk] = []
        room = 0
        for group, size in zip(groups, sizes, strict=True):
            if size > room or not chunks:
                chunks.append([])
                room = most
            chunks[-1].append(group)
            room -= size
        return chunks

    def train_groups(
        self, server: Tree, groups: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
    ) -> list[GroupUpdate]:
        """Trains one client after another."""
        with one_thread():
            clients = [client for group in groups for client in group]
            if self.shares_trainer:
                updates = train_clients(self.training, server, clients, kept, round, self.features)
            else:
                updates: dict[int, Update | Failure] = {}
                for client in clients:
                    train = partial(self._train_client, server, client, kept, round)
                    updates[client] = guarded(train, self.training.client_timeout)
        return [group_update(self.training, group, [updates[client] for client in group]) for group in groups]

    def _train_client(self, server: Tree, client_id: int, kept: Mapping[int, Tree], round: int) -> Update:
        """One client's part of a round."""
        training = self.training.of(client_id)
        client, const, samples = begin_client(training, copy_module(training.module), server, client_id, kept, round)
        if not len(samples) or not trainable_names(training, client.module, round):
            return end_client(training, client, const, {})
        placed = on_device(const, training.device)
        if self.lean:
            features = self.features.find(training, client, placed, samples)
            trainer = _fit_lean(training, client, placed, samples, features)
        else:
            trainer = _fit_every_batch(training, client, placed, samples)
        client.steps = trainer.global_step
        parameters = client.module.named_parameters()
        optimizer = optimizer_state(parameters, trainer.optimizers[0]) if training.keep_optimizer else {}
        client.module.zero_grad()
        update = end_client(training, client, const, optimizer)
        discard(trainer)
        return update


def _fit_lean(
    training: LocalTraining, client: Client, const: dict[str, Any], samples: Tensor, features: Features | None
) -> Trainer:
    clip = training.trainer.get("gradient_clip_val"), training.trainer.get("gradient_clip_algorithm")
    module = _LeanClientModule(client, training.algorithm, const, *clip)
    freezing = Freezing(training, client.module, client.round)
    batches = client_batches(training, client, samples)
    validation = _validation_batches(training, client)
    if features is None or validation is not None:  # validation samples have no features
        return fit_epochs(training, module, batches, validation, freezing)
    lookup: Tree = {}
    with looked_up(client.module, features.parts.names, lookup):
        return fit_epochs(training, module, LookedUpBatches(batches, features, lookup), None, freezing)


def _fit_every_batch(training: LocalTraining, client: Client, const: dict[str, Any], samples: Tensor) -> Trainer:
    module = client.module
    if trains_by_loss(training.algorithm, module):
        module = _ClientModule(client.module, training.algorithm, const)
    freezing = Freezing(training, client.module, client.round)
    batches = client_batches(training, client, samples)
    loggers = client_loggers(training, client)
    callbacks = [freezing, _LossCheck(client)]
    validation, epochs = _validation_batches(training, client), freezing.epochs
    try:
        return fit(training, module, batches, validation, callbacks, logger=loggers or False, max_epochs=epochs)
    finally:
        finish(loggers)


def _validation_batches(training: LocalTraining, client: Client) -> Any:
    samples = training.datamodule.validation_samples[client.id]
    samples = training.algorithm.opted_in(client.id, samples, training.seed, validation=True)
    validates = len(samples) and training.trainer["limit_val_batches"]
    # batches as large as in evaluations, because the logged loss is a mean over samples
    size = training.datamodule.evaluated_at_once
    return training.datamodule.batches(samples, batch_size=size) if validates else None


class _LossCheck(Callback):
    """Notes whether the losses of a client's training steps are finite, also of a user's own ``training_step``."""

    def __init__(self, client: Client) -> None:
        self.client = client

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if isinstance(loss, Tensor) and loss.ndim == 0:  # manual optimization may return anything
            self.client.see_loss(loss)


class _ClientLoss(LightningModule):
    """Base of both client modules below: it validates, and uses the user's optimizer."""

    module: LightningModule
    algorithm: Algorithm
    const: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        """An attribute of the client's module, such as its gate, for a user's callbacks."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.algorithm.validation_loss(self.module, batch, self.const)
        self.log("validation_loss", loss, batch_size=batch_length(batch))

    def configure_optimizers(self) -> Any:
        return self.module.configure_optimizers()


class _ClientModule(_ClientLoss):
    """The client's module in a Trainer that sees every batch."""

    def __init__(self, module: LightningModule, algorithm: Algorithm, const: dict[str, Any]) -> None:
        super().__init__()
        self.module = module
        self.algorithm = algorithm
        self.const = const

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.algorithm.client_loss(self.module, batch, self.const)[0]
        if self.trainer.loggers:
            self.log("train_loss", loss, on_step=True, on_epoch=True, batch_size=batch_length(batch))
        return loss


class _LeanClientModule(_ClientLoss, EpochModule):
    """The client's module in a Trainer that runs each epoch in one training step."""

    def __init__(
        self,
        client: Client,
        algorithm: Algorithm,
        const: dict[str, Any],
        clip_val: float | None,
        clip_algorithm: str | None,
    ) -> None:
        EpochModule.__init__(self, clip_val, clip_algorithm)
        self.client = client
        self.module = client.module
        self.algorithm = algorithm
        self.const = const

    def loss(self, batch: Any) -> Tensor:
        return self.client.see_loss(self.algorithm.client_loss(self.module, batch, self.const)[0])
