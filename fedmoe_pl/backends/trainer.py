"""A Lightning Trainer per client, one after another, in this process."""

from __future__ import annotations

import copy
import logging
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Generator, Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedmoe_pl.aggregation import Tree, copy_module
from fedmoe_pl.algorithm import Algorithm, Client
from fedmoe_pl.backends.backend import Backend, GroupUpdate, LocalTraining
from fedmoe_pl.models import PersonalizedMoE
from fedmoe_pl.seeds import derive_seed, seed_all

LEAN_TRAINER: dict[str, Any] = {
    "max_epochs": 1,
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
}
"""Defaults of a client's Trainer: what costs time for every client and belongs to the federation is off."""

_CLIENT = 0  # tells a client's stream of random numbers from those of cohorts and splits


class TrainerBackend(Backend):
    """A ``Trainer`` per client and round; a Trainer serves one fit, and making one takes a few milliseconds.

    On a CPU, clients train with one thread: small models gain little from more and stall when another process holds a
    core, and results do not depend on the machine's number of cores.
    """

    def train(
        self, training: LocalTraining, server: Tree, cohort: Sequence[int], kept: Mapping[int, Tree], round: int
    ) -> Iterator[GroupUpdate]:
        """Trains and yields one client at a time."""
        for client_id in cohort:
            with one_thread():
                group = _train_client(training, server, client_id, kept.get(client_id, {}), round)
            yield group


def changes_loss(algorithm: Algorithm) -> bool:
    """Whether the algorithm has a local loss of its own, for which the module must have a method ``loss(batch)``."""
    return type(algorithm).client_loss is not Algorithm.client_loss


def has_batch_norm(module: LightningModule) -> bool:
    """Whether the module has batch normalization, which refuses to train on one sample (METHODS section 2)."""
    return any(isinstance(part, _BatchNorm) for part in module.modules())


def _train_client(training: LocalTraining, server: Tree, client_id: int, kept: Tree, round: int) -> GroupUpdate:
    """One client's part of a round: DESIGN section 3."""
    algorithm = training.algorithm
    seed = derive_seed(training.seed, _CLIENT, client_id, round)
    seed_all(seed)
    sent = algorithm.server_send(server, client_id)
    client = Client(
        id=client_id,
        round=round,
        seed=training.seed,
        module=copy_module(training.module),
        samples=training.datamodule.train_samples[client_id],
        kept=kept,
        loaded={**training.initial, **sent},
    )
    const = algorithm.client_init(client, sent)
    samples = algorithm.client_samples(client)
    if len(samples) and _trains_anything(client, algorithm, training.trainer["max_epochs"]):
        _fit(training, client, samples, const, seed)
    update = algorithm.client_final(client, const)
    return GroupUpdate(update, {client_id: update.kept})


def _trains_anything(client: Client, algorithm: Algorithm, max_epochs: int) -> bool:
    names = [name for name, _ in client.module.named_parameters()]
    return any(algorithm.is_trainable(name, client.round, epoch) for epoch in range(max_epochs) for name in names)


def _fit(training: LocalTraining, client: Client, samples: Tensor, const: dict[str, Any], seed: int) -> None:
    datamodule = training.datamodule
    batches = datamodule.batches(
        samples,
        batch_size=training.batch_size,
        generator=Generator().manual_seed(seed),
        augment=True,
        drop_single=has_batch_norm(client.module),
    )
    validation = datamodule.validation_samples[client.id]
    validates = len(validation) and training.trainer["limit_val_batches"]
    trainer_arguments = copy.deepcopy(training.trainer)
    callbacks = trainer_arguments.pop("callbacks", None) or []
    freezing = _Freezing(client.module, training.algorithm, client.round)
    module = client.module
    if isinstance(module, PersonalizedMoE) or changes_loss(training.algorithm):
        module = _ClientModule(client.module, training.algorithm, const)
    with quiet():
        trainer = Trainer(
            callbacks=[freezing, *(callbacks if isinstance(callbacks, list) else [callbacks])], **trainer_arguments
        )
        try:
            trainer.fit(module, batches, datamodule.batches(validation) if validates else None)
        except SystemExit as exit:
            if not trainer.interrupted:
                raise
            signal.signal(signal.SIGINT, signal.default_int_handler)  # Lightning ignores it from its exit on
            raise KeyboardInterrupt from exit
    # A Trainer is a web of references that waits for the garbage collector; what is large need not wait with it.
    client.module.zero_grad()
    for optimizer in trainer.optimizers:
        optimizer.state.clear()


class _ClientModule(LightningModule):
    """The client's module with the loss as its algorithm sees it, and nothing logged in the training step."""

    def __init__(
        self,
        module: LightningModule,
        algorithm: Algorithm,
        const: dict[str, Any],
    ) -> None:
        super().__init__()
        self.module = module
        self.algorithm = algorithm
        self.const = const

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.algorithm.client_loss(self.module, batch, self.const)[0]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.algorithm.client_loss(self.module, batch, self.const)[0]
        self.log("validation_loss", loss, batch_size=len(batch[-1]))

    def configure_optimizers(self) -> Any:
        return self.module.configure_optimizers()


class _Freezing(Callback):
    """Trains what the algorithm says is trainable in this epoch, and freezes the rest."""

    def __init__(self, module: LightningModule, algorithm: Algorithm, round: int) -> None:
        self.module = module
        self.algorithm = algorithm
        self.round = round
        self.frozen: list[nn.Module] = []
        self.frozen_by_user = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for name, parameter in self.module.named_parameters():
            trainable = self.algorithm.is_trainable(name, self.round, trainer.current_epoch)
            parameter.requires_grad_(trainable and name not in self.frozen_by_user)
        if not self.algorithm.frozen_train_mode:
            self.frozen = [
                submodule for submodule in self.module.modules() if submodule.training and _is_frozen(submodule)
            ]
            for submodule in self.frozen:
                submodule.eval()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        for submodule in self.frozen:  # another part may be frozen in the next epoch
            submodule.train()


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes with one CPU thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextmanager
def quiet() -> Iterator[None]:
    """Keeps what Lightning says at every fit ("GPU available: ...") out of the federation's output."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # A client without validation samples is not a mistake.
            warnings.filterwarnings("ignore", "You defined a `validation_step` but have no `val_dataloader`")
            # lightning 2.6 with torch 2.14 and newer; nothing that a user could mend.
            warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)` is deprecated")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
