"""Trains one client after another in Lightning Trainers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Client, Update
from fedmoe_pl.algorithms.shared.parts import counted, pair_of
from fedmoe_pl.backends.backend import Backend, Chunk, GroupUpdate, Plan, group_size, group_updates
from fedmoe_pl.backends.batch_shares import Sharing
from fedmoe_pl.backends.best_epoch import BestEpoch
from fedmoe_pl.backends.client_loggers import EpochMeans, client_folder, client_loggers, finish
from fedmoe_pl.backends.failures import Failure, guarded
from fedmoe_pl.backends.features import FeatureCache, LookedUpBatches, looked_up
from fedmoe_pl.backends.fitting import discard, fit, one_thread
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.backends.local_client import begin_client, client_batches, end_client, on_device
from fedmoe_pl.backends.loop import (
    EndedTraining,
    Learner,
    Loop,
    OneStep,
    in_one_step,
    needs_every_batch,
    needs_trainer,
    trains_by_loss,
)
from fedmoe_pl.backends.optimizers import optimizer_state
from fedmoe_pl.backends.private_client import PrivateClient, check_private
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.data import batch_length
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.trees import Tree

_MOST_GROUPS = 64  # enough that workers do not wait long for the last group
_SAMPLES_PER_TRAINER = 2000  # over all epochs; creating a Trainer costs as much as training on a few hundred samples
_BYTES_PER_TRAINER = 2**29  # of its clients' updates, which stay in memory until the last client is trained


class TrainerBackend(Backend):
    """Trains each client in a Lightning ``Trainer`` per round, or many clients in one.

    If nothing must see a client's batches (callbacks, validation, gradient accumulation, a logger, a plugin or a user's
    ``training_step``), clients share a ``Trainer``, whose training step trains one after another in a bare loop.
    Results take less time and are bit-identical or, where outputs of frozen parts are looked up, equal up to rounding.
    If a loss or ``client_final`` reads or sets an attribute of its Trainer that a bare loop does not have, such as
    ``estimated_stepping_batches`` or ``should_stop``, each client is trained in its own ``Trainer`` from then on.

    Args:
        loss_is_mean: whether the loss of a batch is the mean over its samples, so that ``trainer.strategy`` may divide
            batches among processes. You need not say so for losses of this package or PyTorch's with layers that
            compute each sample's output independently.
    """

    def __init__(self, loss_is_mean: bool = False) -> None:
        self.loss_is_mean = loss_is_mean

    def plan(self, training: LocalTraining) -> TrainerPlan:
        """Decides whether clients share a Trainer."""
        return TrainerPlan(training, type(self).__name__)


class TrainerPlan(Plan):
    """The plan of :class:`TrainerBackend`."""

    def __init__(self, training: LocalTraining, description: str) -> None:
        super().__init__(training, description)
        if training.sample_privacy is not None:
            check_private(training)
        self.shares_trainer = not training.validates and needs_every_batch(training) is None
        self.features = FeatureCache()
        self.logged: dict[int, list[dict[str, float]]] = {}

    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """One client per group; in a large cohort, at most 64 groups of neighbours."""
        size = max(-(-len(cohort) // _MOST_GROUPS), 1)  # a round may be without clients
        return [list(cohort[start : start + size]) for start in range(0, len(cohort), size)]

    def chunks(self, groups: Sequence[list[int]], at_least: int = 1) -> list[Chunk]:
        """Chunks of neighbouring groups that are small enough to share a Trainer."""
        if not self.shares_trainer:
            return super().chunks(groups)
        training = self.training
        changing = sum(tensor.nbytes for name, tensor in training.initial.items() if name not in training.untrained)
        least = -(-_SAMPLES_PER_TRAINER * changing // _BYTES_PER_TRAINER)  # a client's least size, to keep both limits
        sizes = [max(training.max_epochs * group_size(training, group), least * len(group)) for group in groups]
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
        updates: dict[int, Update | Failure] = {}
        self.logged = {}

        def train(step: OneStep | None) -> None:
            for client_id in (client for group in groups for client in group):
                train_one = partial(self._train_client, server, kept, round, step, client_id)
                updates[client_id] = guarded(train_one, self.training.client_timeout)

        with one_thread():
            if self.shares_trainer:
                in_one_step(self.training, train)
                needs = any(map(needs_trainer, updates.values()))
                self.shares_trainer = self.training.sample_privacy is not None or not needs
            if not self.shares_trainer:
                train(None)
        return group_updates(self.training, groups, updates, self.logged)

    def _train_client(
        self, server: Tree, kept: Mapping[int, Tree], round: int, step: OneStep | None, client_id: int
    ) -> Update:
        """Trains one client, in the bare loop of a Trainer's step or in a Trainer of its own."""
        training = self.training.of(client_id)
        client, constants, samples = begin_client(training, training.copies.copy(), server, client_id, kept, round)
        freezing = Freezing(training, client.module, round)
        if not len(samples) or not freezing.epochs:
            return end_client(training, client, constants, {})
        there, trainer = on_device(constants, training.device), None
        if step is None:
            trainer = self._fit(training, client, there, samples, freezing)
            optimizers, client.steps = trainer.optimizers, _steps(trainer)
            client.module.zero_grad()
        else:
            optimizers = self._fit_in_loop(step, training, client, there, samples, freezing)
        state = optimizer_state(client.module.named_parameters(), optimizers[0]) if training.keep_optimizer else {}
        ended = nullcontext() if step is None else EndedTraining(client, freezing.stop_after).attached(client.module)
        with ended:
            update = end_client(training, client, constants, state)
        training.copies.try_out(client)
        if trainer is not None:
            discard(trainer)
        return update

    def _fit(
        self, training: LocalTraining, client: Client, constants: dict[str, Any], samples: Tensor, freezing: Freezing
    ) -> Trainer:
        batches, validation = client_batches(training, client, samples), _validation_batches(training, client)
        sharing = Sharing(training, client, batches) if training.devices else None
        loggers, given = client_loggers(training, client), training.trainer.get("logger")
        means = [EpochMeans()] if given else []
        callbacks = [freezing, _MoveBack(training, client.module), *means]
        callbacks += [] if sharing is None else [sharing]
        training.copies.move(client.module, training.device)
        arguments = {"max_epochs": freezing.epochs, "default_root_dir": client_folder(training, client)}
        if given is True:  # a module may log single steps in an epoch of fewer than Lightning's default of 50
            arguments["log_every_n_steps"] = training.trainer.get("log_every_n_steps", 1)
        try:
            with algorithm_steps(training, client, constants, sharing) as module:
                return fit(
                    training, module, batches, validation, callbacks, logger=[*loggers, *means] or False, **arguments
                )
        finally:
            self.logged[client.id] = [epoch for each in means for epoch in each.epochs]
            finish(loggers)

    def _fit_in_loop(
        self,
        step: OneStep,
        training: LocalTraining,
        client: Client,
        constants: dict[str, Any],
        samples: Tensor,
        freezing: Freezing,
    ) -> list[torch.optim.Optimizer]:
        """Trains a client in the bare loop; returns its optimizer, as a Trainer does."""
        module, lookup = client.module, Tree()
        features = self.features.find(training, client, constants, samples)
        batches = drawn = client_batches(training, client, samples)
        if features is not None:
            batches = LookedUpBatches(batches, features, lookup)
        training.copies.move(module, training.device)
        learner: Learner
        if training.sample_privacy is None:
            learner = _ClientAlone(training, client, constants, batches, step)
        else:
            learner = PrivateClient(training, client, constants, batches, drawn, lookup, step)
        loop = Loop(step.trainer, training, freezing)
        with looked_up(module, features.parts.names if features else (), lookup):
            optimizer = loop.run(learner)
        client.steps = loop.steps
        module.zero_grad()
        training.copies.move(module, torch.device("cpu"))
        return [optimizer]


def _steps(trainer: Trainer) -> int:
    """The number of optimizer steps behind the module's tensors: fewer than all if its best epoch was restored."""
    restored = [each.steps for each in trainer.callbacks if isinstance(each, BestEpoch)]  # pyright: ignore[reportAttributeAccessIssue]
    return next(filter(None, reversed(restored)), trainer.global_step)


@contextmanager
def algorithm_steps(
    training: LocalTraining, client: Client, constants: dict[str, Any], sharing: Sharing | None = None
) -> Iterator[LightningModule]:
    """In this context, the client's module trains with the algorithm's loss, unless its own step is used."""
    module, names = client.module, ["training_step", "validation_step"] if trains_by_loss(training) else []
    names += ["loss"] if names and isinstance(module, MixtureOfExperts) else []
    own = {name: vars(module)[name] for name in names if name in vars(module)}
    steps = _Steps(module, training.algorithm, constants, sharing)
    for name in names:
        setattr(module, name, getattr(steps, name))
    try:
        yield module
    finally:
        for name in names:
            delattr(module, name)
        vars(module).update(own)


def _validation_batches(training: LocalTraining, client: Client) -> Any:
    samples = training.datamodule.validation_samples[client.id]
    samples = training.algorithm.opt_out.opted_in(client.id, samples, training.seed, validation=True)
    validates = len(samples) and training.trainer["limit_val_batches"]
    # batches can be as large as in evaluations, because the logged loss is a mean over samples
    size = training.datamodule.evaluated_at_once
    return training.datamodule.batches(samples, batch_size=size) if validates else None


class _MoveBack(Callback):
    """Moves the client's module back to the CPU in place of its Trainer, which would also copy what clients share."""

    def __init__(self, training: LocalTraining, module: LightningModule) -> None:
        self.training, self.module = training, module

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        def move_and_tear_down() -> None:
            vars(trainer.strategy).pop("teardown")  # restores the strategy's own method
            self.training.copies.move(self.module, torch.device("cpu"))
            trainer.strategy.teardown()

        trainer.strategy.teardown = move_and_tear_down


class _Steps:
    """The algorithm's loss in place of a module's own training step."""

    def __init__(
        self, module: LightningModule, algorithm: Algorithm, constants: dict[str, Any], sharing: Sharing | None
    ) -> None:
        self.module = module
        self.own_loss: Any = getattr(module, "loss", None)  # which the module may have been given
        self.algorithm = algorithm
        self.constants = constants
        self.sharing = sharing

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.algorithm.client_loss(self.module, batch, self.constants)
        if loss is not None and self.sharing is not None and not self.sharing.weight:
            loss = loss.nan_to_num()  # a mean over no labels is NaN
        if loss is not None:
            self._log({"train_loss": (loss, _counted(self.module, batch))})
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.algorithm.validation_loss is None:
            loss = self.module.loss(batch)[0]  # pyright: ignore[reportCallIssue]
        else:
            loss = self.algorithm.validation_loss(self.module, batch, self.constants)
        size = _counted(self.module, batch)  # the mean over nothing is nan
        self.module.log("validation_loss", loss if size else torch.zeros_like(loss), batch_size=size)

    def loss(self, batch: Any) -> Any:
        """A mixture's own loss, which most algorithms' losses call; also logs what the mixture's own steps would."""
        module: Any = self.module
        loss, outputs = self.own_loss(batch)
        if loss is not None and module.trainer.loggers:
            self._log(module.metrics_of(batch, outputs, "train" if module.trainer.training else "validation"))
        return loss, outputs

    def _log(self, means: dict[str, tuple[Tensor, Any]]) -> None:
        """Logs the means over an epoch, under a mixture's own names. A count may be a fraction, unlike in Lightning."""
        trainer = self.module.trainer
        if trainer.loggers and self.sharing is not None and trainer.training:
            means = self.sharing.of_batch(trainer, means)
        for name, (mean, count) in means.items() if trainer.loggers else ():
            if count:
                self.module.log(name, mean, on_step=False, on_epoch=True, batch_size=count)


def _counted(module: LightningModule, batch: Any) -> Any:
    """The weight of the batch's mean loss in a mean over batches."""
    return counted(module, pair_of(module, batch)[1]) if isinstance(module, MixtureOfExperts) else batch_length(batch)


class _ClientAlone(Learner):
    """A client in a bare loop."""

    def __init__(
        self, training: LocalTraining, client: Client, constants: dict[str, Any], batches: Any, step: OneStep
    ) -> None:
        self.training, self.client, self.module = training, client, client.module
        self.constants, self.batches, self.step = constants, batches, step
        self.clipping = [training.trainer.get(f"gradient_clip_{name}") for name in ("val", "algorithm")]

    def epoch(self) -> Any:
        return self.batches

    def loss(self, batch: Any) -> Tensor | None:
        loss = self.training.algorithm.client_loss(self.module, batch, self.constants)
        if loss is None:  # as Lightning says of a training step
            rank_zero_warn("`client_loss` returned `None`. If this was on purpose, ignore this warning...")
        return loss

    def backward(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        loss.backward()
        if self.clipping[0] is not None:
            self.step.clip_gradients(optimizer, *self.clipping)
