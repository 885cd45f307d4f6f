"""Trains one client after another in Lightning Trainers."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor
from torchmetrics import Metric

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Client, Update
from fedmoe_pl.algorithms.shared.parts import counted, pair_of
from fedmoe_pl.backends.backend import Backend, Chunk, GroupUpdate, Plan, group_size, group_updates
from fedmoe_pl.backends.best_epoch import BestEpoch
from fedmoe_pl.backends.failures import Failure, guarded
from fedmoe_pl.backends.features import FeatureCache, LookedUpBatches, looked_up
from fedmoe_pl.backends.fitting import discard, fit, one_thread
from fedmoe_pl.backends.local_client import Freezing, begin_client, client_batches, end_client, on_device
from fedmoe_pl.backends.loop import (
    Learner,
    Loop,
    NeedsTrainerError,
    OneStep,
    in_one_step,
    needs_every_batch,
    trains_by_loss,
)
from fedmoe_pl.backends.optimizers import optimizer_state
from fedmoe_pl.backends.private_client import PrivateClient, check_private
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import SampleBatches, Share, batch_length
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.models.mixtures.tasks import weight_of
from fedmoe_pl.seeds import derive_seed, seed_all
from fedmoe_pl.trees import Tree

_MOST_GROUPS = 64  # enough that workers do not wait long for the last group
_SAMPLES_PER_TRAINER = 2000  # over all epochs; creating a Trainer costs as much as training on a few hundred samples
_BYTES_PER_TRAINER = 2**29  # of its clients' updates, which stay in memory until the last client is trained


class TrainerBackend(Backend):
    """Trains each client in a Lightning ``Trainer`` per round, or many clients in one.

    If nothing must see a client's batches (callbacks, validation, gradient accumulation, a logger, a plugin or a user's
    ``training_step``), clients share a ``Trainer``, whose training step trains one after another in a bare loop.
    Results are bit-identical and take less time. If a loss reads an attribute of its Trainer that a bare loop does not
    have, such as ``estimated_stepping_batches``, each client is trained in its own ``Trainer`` from then on.

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
        validates = training.trainer["limit_val_batches"] and len(training.datamodule.validation_samples.indices)
        self.shares_trainer = not validates and needs_every_batch(training) is None
        self.logged: dict[int, list[dict[str, float]]] = {}

    @cached_property
    def features(self) -> FeatureCache:
        """The outputs of frozen parts."""
        return FeatureCache()

    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """One client per group; in a large cohort, at most 64 groups of neighbours."""
        size = -(-len(cohort) // _MOST_GROUPS)
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
        clients = [client for group in groups for client in group]
        updates: dict[int, Update | Failure] = {}
        self.logged = {}
        with one_thread():
            if self.shares_trainer:
                group = _Group(self.training, server, kept, round, self.features)
                in_one_step(self.training, partial(group.train, clients))
                updates = group.updates
                self.shares_trainer = self.training.sample_privacy is not None or not any(
                    map(_needs_trainer, updates.values())
                )
            if not self.shares_trainer:
                train = partial(self._train_client, server, kept, round)
                updates = {c: guarded(partial(train, c), self.training.client_timeout) for c in clients}
        return group_updates(self.training, groups, updates, self.logged)

    def _train_client(self, server: Tree, kept: Mapping[int, Tree], round: int, client_id: int) -> Update:
        """Trains one client in a Trainer of its own."""
        training = self.training.of(client_id)
        module = training.copies.copy()
        client, constants, samples = begin_client(training, module, server, client_id, kept, round)
        freezing = Freezing(training, client.module, round)
        if not len(samples) or not freezing.epochs:
            return end_client(training, client, constants, {})
        trainer = self._fit(training, client, on_device(constants, training.device), samples, freezing)
        client.steps = _steps(trainer)
        parameters = client.module.named_parameters()
        optimizer = optimizer_state(parameters, trainer.optimizers[0]) if training.keep_optimizer else {}
        client.module.zero_grad()
        update = end_client(training, client, constants, optimizer)
        training.copies.try_out(client)
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


def _needs_trainer(update: Update | Failure) -> bool:
    return isinstance(update, Failure) and isinstance(update.error, NeedsTrainerError)


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
    steps = _Steps(module, training.algorithm, constants, sharing)
    for name in names:
        setattr(module, name, getattr(steps, name))
    try:
        yield module
    finally:
        for name in names:
            delattr(module, name)


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
        self.algorithm = algorithm
        self.constants = constants
        self.sharing = sharing

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = self.algorithm.client_loss(self.module, batch, self.constants)
        if loss is not None and self.sharing is not None and not self.sharing.weight:
            loss = loss.nan_to_num()  # a mean over no labels is NaN
        if loss is not None:
            self._log({"train_loss": loss}, _counted(self.module, batch))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.algorithm.validation_loss is None:
            loss = self.module.loss(batch)[0]  # pyright: ignore[reportCallIssue]
        else:
            loss = self.algorithm.validation_loss(self.module, batch, self.constants)
        self.module.log("validation_loss", loss, batch_size=_counted(self.module, batch))

    def loss(self, batch: Any) -> Any:
        """A mixture's own loss, which most algorithms' losses call; also logs what the mixture's own steps would."""
        module: Any = self.module
        loss, outputs = type(module).loss(module, batch)
        if loss is not None and module.trainer.loggers:
            stage = "train" if module.trainer.training else "validation"
            self._log(module.metrics_of(batch, outputs, stage), len(pair_of(module, batch)[1]))
        return loss, outputs

    def _log(self, values: dict[str, Tensor], size: int) -> None:
        """Logs the means over an epoch, under the names that a mixture's own steps use."""
        trainer = self.module.trainer
        if not trainer.loggers:
            return
        if self.sharing is not None and trainer.training:
            size, mean = self.sharing.size, self.sharing.mean
            values = {name: mean(trainer, value.nan_to_num()) for name, value in values.items()}
        self.module.log_dict(values, on_step=False, on_epoch=True, batch_size=size)


def _counted(module: LightningModule, batch: Any) -> int:
    """The weight of the batch's mean loss in a mean over batches."""
    return counted(module, pair_of(module, batch)[1]) if isinstance(module, MixtureOfExperts) else batch_length(batch)


@dataclass
class _Group:
    """Clients that are trained one after another in one Trainer."""

    training: LocalTraining
    server: Tree
    kept: Mapping[int, Tree]
    round: int
    features: FeatureCache
    updates: dict[int, Update | Failure] = field(default_factory=dict)

    def train(self, clients: Sequence[int], step: OneStep) -> None:
        """Trains the clients."""
        for client_id in clients:
            self.updates[client_id] = guarded(
                partial(self._train_client, step, client_id), self.training.client_timeout
            )

    def _train_client(self, step: OneStep, client_id: int) -> Update:
        """Trains one client in the bare loop."""
        training = self.training.of(client_id)
        client, constants, samples = begin_client(
            training, training.copies.copy(), self.server, client_id, self.kept, self.round
        )
        optimizer: Tree = {}
        freezing = Freezing(training, client.module, self.round)
        if len(samples) and freezing.epochs:
            there = on_device(constants, training.device)
            optimizer = self._fit(step, training, client, there, samples, freezing)
        update = end_client(training, client, constants, optimizer)
        training.copies.try_out(client)
        return update

    def _fit(
        self,
        step: OneStep,
        training: LocalTraining,
        client: Client,
        constants: dict[str, Any],
        samples: Tensor,
        freezing: Freezing,
    ) -> Tree:
        """Trains a client; returns its optimizer's state if clients keep it, otherwise an empty tree."""
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
        return optimizer_state(module.named_parameters(), optimizer) if training.keep_optimizer else {}


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

    def configure_optimizers(self) -> Any:
        return self.module.configure_optimizers()

    def loss(self, batch: Any) -> Tensor | None:
        return self.training.algorithm.client_loss(self.module, batch, self.constants)

    def backward(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        loss.backward()
        if self.clipping[0] is not None:
            self.step.clip_gradients(optimizer, *self.clipping)


_DRAWS = 11  # seed key that separates the random numbers of a process's share from the client's


class Sharing(Callback):
    """Has this process's Trainer train on its share of each batch.

    Gradients are averaged over the processes, but shares may differ in size, and a share of a short batch may be empty.
    Each loss is therefore weighted by its share's size, so that the average is the gradient of the mean over the whole
    batch. A mean over labels is weighted by the labels that are not ignored, or by the sum of their classes' weights.
    """

    def __init__(self, training: LocalTraining, client: Client, batches: SampleBatches) -> None:
        self.rank = torch.distributed.get_rank()
        is_split = training.has_batch_norm and not training.trainer.get("sync_batchnorm")
        if not is_split and training.has_batch_norm and batches.size(len(batches) - 1) < len(training.devices):
            because = f"a last batch of client {client.id} has too few samples for {len(training.devices)} processes"
            raise InvalidArgumentError("Trainer", "trainer.sync_batchnorm", True, "left out", because)
        self.share = batches.share = Share(self.rank, len(training.devices), at_least=2 if is_split else 1)
        self.batches = batches
        self.has_labels = isinstance(module := client.module, MixtureOfExperts) and module.task == "multiclass"
        self.has_labels = self.has_labels and trains_by_loss(training)
        self.size = 0  # samples in the whole batch
        self.weight = 1.0
        keys = client.id, client.rounds_before + client.round, self.rank
        self.seed = derive_seed(training.seed, _DRAWS, *keys)

    def mean(self, trainer: Trainer, loss: Tensor) -> Tensor:
        """The mean loss over the whole batch, given the mean over this process's share."""
        return trainer.strategy.reduce(loss.detach() * self.weight)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reseeds, because DDP has set the global seed, and each share needs dropout masks of its own."""
        seed_all(self.seed)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Computes the weight of this share's loss."""
        self.size = self.batches.size(batch_idx)
        self.weight = self.share.weight(self.size)
        if self.has_labels:
            module: Any = pl_module
            counts = weight_of(module.task, module.criterion, pair_of(module, batch)[1]) if self.weight else 0.0
            mean = trainer.strategy.reduce(torch.tensor(counts, dtype=torch.float64, device=pl_module.device)).item()
            self.weight = counts / mean if mean else 0.0

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Scales the gradients; the logged loss stays unscaled."""
        weight = self.weight
        loss.register_hook(lambda gradient: gradient * weight)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keeps metrics from summing over processes, because each process validates all samples."""
        self._synchronize(pl_module, False)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Has metrics sum over processes again."""
        self._synchronize(pl_module, True)

    def _synchronize(self, pl_module: LightningModule, does: bool) -> None:
        for part in pl_module.modules():
            if isinstance(part, Metric):
                part.sync_on_compute = does


class SilentLogger(DummyLogger):
    """Lightning's logger that writes nothing, for training whose logs are discarded; can be copied and pickled."""

    def __deepcopy__(self, memo: Any) -> SilentLogger:
        return self

    def __reduce__(self) -> tuple[type[SilentLogger], tuple[()]]:
        return SilentLogger, ()


class EpochMeans(LearningRateMonitor, SilentLogger):
    """A logger and callback of a client's Trainer that keeps each epoch's mean of every metric and learning rate."""

    def __init__(self) -> None:
        SilentLogger.__init__(self)
        LearningRateMonitor.__init__(self, "epoch")
        self._logged: list[dict[str, list[float]]] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:  # pyright: ignore
        """Begins an epoch and records its learning rates."""
        self._logged.append({})
        super().on_train_epoch_start(trainer, pl_module)

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:  # pyright: ignore
        """Records what the Trainer's steps have logged."""
        for name, value in metrics.items() if self._logged else ():
            if name != "epoch":
                self._logged[-1].setdefault(name, []).append(float(value))

    @property
    def epochs(self) -> list[dict[str, float]]:
        """The means of each epoch."""
        return [{name: sum(values) / len(values) for name, values in epoch.items()} for epoch in self._logged]


def client_name(training: LocalTraining, client: Client) -> str:
    """The name of a client's training in one round, such as ``FedAvg/client_003/round_0012``; rounds count from 1."""
    name = training.datamodule.client_names.file(client.id)
    return f"{training.phase}/{name}/round_{client.round + 1:04d}"


def client_folder(training: LocalTraining, client: Client) -> str:
    """A client Trainer's ``default_root_dir``, where checkpoint callbacks and profilers write if there is no logger."""
    root = training.trainer.get("default_root_dir") or os.getcwd()
    return os.path.join(root, training.run, client_name(training, client))


def client_loggers(training: LocalTraining, client: Client) -> list[Logger]:
    """Copies of the loggers in the Trainer's arguments, named by :func:`client_name` for one client and round.

    There is none for ``logger: true``: what clients log then goes only to the run's loggers.
    For TensorBoard and CSV, the name becomes a folder below the logger's ``version`` or, without one, below a folder
    named after the run, so that no two runs log to the same files. For MLflow and Weights & Biases, it becomes the name
    of the run. If the federation itself logs to Weights & Biases in this process, clients log to its run, with their
    names as prefixes of the metrics. Other loggers keep their names.
    """
    given, name = training.trainer.get("logger"), client_name(training, client)
    return [
        _renamed(logger, name, training.run)
        for logger in (given if isinstance(given, list | tuple) else [given])
        if isinstance(logger, Logger)
    ]


def _renamed(logger: Logger, name: str, run: str) -> Logger:
    """A renamed copy of a logger that has not logged yet; Lightning has no public way to rename a logger."""
    if isinstance(logger, WandbLogger):  # `copy` would open its run
        import wandb  # pyright: ignore[reportMissingImports]  optional

        renamed = object.__new__(type(logger))
        vars(renamed).update(vars(logger), _wandb_init={**logger._wandb_init, "name": name}, _name=name)
        if wandb.run is not None:  # a process can have only one run
            renamed._experiment = wandb.run
            renamed._prefix = f"{name}/{logger._prefix}".rstrip("/")
            setattr(renamed, "LOGGER_JOIN_CHAR", "/")  # noqa: B010  typed as a constant
        return renamed
    logger = copy.deepcopy(logger)
    if isinstance(logger, TensorBoardLogger | CSVLogger):
        version = logger._version
        folder = run if version is None else version if isinstance(version, str) else f"version_{version}"
        logger._version = os.path.join(folder, name)
    elif isinstance(logger, MLFlowLogger):
        logger._run_name = name
    return logger


def finish(loggers: list[Logger]) -> None:
    """Ends the clients' own Weights & Biases runs, because the next client would continue an open one."""
    for logger in loggers:
        if isinstance(logger, WandbLogger) and getattr(logger.experiment, "name", None) == logger._name:
            logger.experiment.finish()
