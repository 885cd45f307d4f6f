"""Runs each local epoch as a bare loop inside one training step of the Trainer."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from fedmoe_pl.backends.fitting import LEAN_TRAINER, client_callbacks, fit
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.backends.hooks import BATCH_HOOKS, trains_by_loss
from fedmoe_pl.backends.optimizers import optimizer_and_scheduler
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.data import SampleBatches

# Arguments that the bare loop respects or that do not matter in a step. Any other argument must have its default.
_LEAN_ARGUMENTS = {
    *("accelerator", "devices", "max_epochs", "precision", "gradient_clip_val", "gradient_clip_algorithm", "callbacks"),
    *("enable_model_summary", "num_sanity_val_steps", "limit_val_batches", "check_val_every_n_epoch"),
    *("log_every_n_steps", "deterministic", "benchmark", "inference_mode", "default_root_dir"),
    "enable_autolog_hparams",
}


def needs_every_batch(training: LocalTraining) -> str | None:
    """The reason why a client's Trainer must see every batch; None if each epoch can run in one training step."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(Trainer).parameters.items()}
    for name, value in training.trainer.items():
        lean = name in _LEAN_ARGUMENTS or value == LEAN_TRAINER.get(name, defaults[name])
        if not lean or (name == "precision" and value not in (None, 32, "32", "32-true", "bf16", "bf16-mixed")):
            return f"trainer.{name} is {shown(value)}"
    for callback in client_callbacks(training):
        hooks = [hook for hook in BATCH_HOOKS if getattr(type(callback), hook) is not getattr(Callback, hook)]
        from_lightning = type(callback).__module__.startswith("lightning.") and not isinstance(callback, EarlyStopping)
        if hooks or from_lightning:
            return f"the callback {type(callback).__name__} sees every batch"
    if not trains_by_loss(training.algorithm, training.module):
        return f"{type(training.module).__name__} has its own training_step or hooks"
    try:
        configured = training.module.configure_optimizers()
    except Exception as error:  # it may need its Trainer
        return f"configure_optimizers needs more than the model ({type(error).__name__}: {error})"
    return _unusual_optimizer(configured)


def shown(value: object) -> str:
    """A value of the configuration; an object, such as a logger, as its class."""
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else str(value)


def _unusual_optimizer(configured: Any) -> str | None:
    """The reason why the bare loop cannot use what ``configure_optimizers`` returned; None if it can."""
    optimizer, _ = optimizer_and_scheduler(configured)
    if optimizer is None:
        return "configure_optimizers returns more than an optimizer and a scheduler stepped once per epoch"
    if inspect.signature(type(optimizer).step).parameters["closure"].default is inspect.Parameter.empty:
        return f"{type(optimizer).__name__} needs a closure"
    return None


class OneStep:
    """A loader with one item, such as the batches of an epoch. It is not a list, which would mean several loaders."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        yield self.item


class EpochModule(LightningModule, ABC):
    """Trains a whole epoch in one training step, by manual optimization: a bare loop inside the Trainer.

    A Trainer adds 0.3 ms to each training step, as much as a step of a small model takes. Subclasses define a step of
    the loop.

    Args:
        clip_val: the Trainer's ``gradient_clip_val``.
        clip_algorithm: the Trainer's ``gradient_clip_algorithm``.
    """

    def __init__(self, clip_val: float | None, clip_algorithm: str | None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.clip_val = clip_val
        self.clip_algorithm = clip_algorithm

    @abstractmethod
    def loss(self, batch: Any) -> Tensor:
        """The loss of a batch, to be differentiated."""

    def differentiate(self, loss: Tensor, optimizer: torch.optim.Optimizer) -> None:
        """Computes the gradients of the optimizer's parameters."""
        optimizer.zero_grad()
        loss.backward()

    def clip(self, optimizer: torch.optim.Optimizer) -> None:
        """Clips the gradients as the Trainer's arguments say."""
        self.clip_gradients(optimizer, self.clip_val, self.clip_algorithm)

    def training_step(self, batches: Iterable[Any], batch_idx: int) -> None:
        """Trains one epoch."""
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, torch.optim.Optimizer)
        mixed = torch.is_autocast_enabled(self.device.type)
        progress = self.trainer.fit_loop.epoch_loop.manual_optimization.optim_step_progress.total
        for batch in batches:
            loss = self.loss(batch)
            # automatic optimization also leaves autocast before the backward pass
            with torch.autocast(self.device.type, enabled=False) if mixed else nullcontext():
                self.differentiate(loss, optimizer)
                if self.clip_val is not None:
                    self.clip(optimizer)
                optimizer.step()
            progress.completed += 1  # global_step counts it
            if mixed:
                torch.clear_autocast_cache()  # it holds half-precision copies of the parameters before the step

    def on_train_epoch_end(self) -> None:
        """Steps the scheduler, because the Trainer does not in manual optimization."""
        scheduler = self.lr_schedulers()
        if scheduler is not None:
            scheduler.step()  # pyright: ignore[reportAttributeAccessIssue, reportCallIssue]


def fit_epochs(
    training: LocalTraining,
    module: EpochModule,
    batches: Iterable[Any],
    validation: SampleBatches | None,
    freezing: Freezing,
    clients: int = 1,
) -> Trainer:
    """Fits with one training step per epoch; arguments as in :func:`fit`."""
    no_clipping = {"gradient_clip_val": None, "gradient_clip_algorithm": None}  # manual optimization refuses to clip
    epochs = {"max_epochs": freezing.epochs}
    return fit(training, module, OneStep(batches), validation, [freezing], clients, **epochs, **no_clipping)
