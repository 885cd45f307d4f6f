"""A bare training loop that runs inside a Trainer's only training step, and which clients it may train."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.func import functional_call

from fedmoe_pl.algorithms.algorithm import Algorithm, overrides
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.backends.fitting import TRAINER_DEFAULTS, discard, fit
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.backends.optimizers import optimizer_and_scheduler
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.models import MixtureOfExperts


class Loss(nn.Module):
    """The algorithm's loss as a module, so that ``functional_call`` can swap the tensors of the client's module."""

    def __init__(self, algorithm: Algorithm, module: LightningModule) -> None:
        super().__init__()
        self.algorithm = algorithm
        self.module = module

    def forward(self, x: Tensor, y: Tensor, constants: dict[str, Any]) -> Tensor:
        """The loss of a batch, of shape ()."""
        return self.algorithm.client_loss(self.module, (x, y), constants)

    def of(self, tensors: Mapping[str, Tensor], x: Tensor, y: Tensor, constants: dict[str, Any]) -> Tensor:
        """The loss computed with other tensors, given under their names in the client's module."""
        return functional_call(self, {f"module.{name}": tensor for name, tensor in tensors.items()}, (x, y, constants))


_MODULE_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end"),
    *("on_train_epoch_start", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_validation_batch_start", "on_validation_batch_end", "validation_step", "backward", "optimizer_step"),
    *("optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping", "configure_callbacks"),
    *("clip_gradients", "setup", "teardown"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)
# Trainer arguments that the bare loop respects, or that do not affect a step, whatever their value
_ANY_VALUE = {
    *("accelerator", "devices", "max_epochs", "gradient_clip_val", "gradient_clip_algorithm", "callbacks"),
    *("enable_model_summary", "num_sanity_val_steps", "limit_val_batches", "check_val_every_n_epoch"),
    *("log_every_n_steps", "deterministic", "benchmark", "inference_mode", "default_root_dir"),
    "enable_autolog_hparams",
}
# and those that it respects only with these values; any other argument must have Lightning's default
_SOME_VALUES = {
    "precision": (None, 32, "32", "32-true", "bf16", "bf16-mixed"),
    **dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), (False,)),
}
# Attributes that the Trainer of a bare loop shares with a client's own: none about batches, optimizers or steps
_SAME_IN_ALL = {
    *("training", "validating", "sanity_checking", "testing", "predicting", "evaluating", "datamodule", "precision"),
    *("logger", "loggers", "barebones", "is_global_zero", "global_rank", "local_rank", "node_rank", "world_size"),
    *("num_devices", "num_nodes", "progress_bar_callback"),  # the last is read by LightningModule.print
}


def trains_by_loss(training: LocalTraining) -> bool:
    """Whether clients train with ``Algorithm.client_loss`` rather than the module's ``training_step``."""
    is_plain = isinstance(training.module, MixtureOfExperts) and not overridden_hooks(training.module)
    return is_plain or overrides(training.algorithm, "client_loss") or training.sample_privacy is not None


def overridden_hooks(module: LightningModule) -> list[str]:
    """The Lightning hooks that a user's module overrides but that training with ``client_loss`` would not call."""
    base = MixtureOfExperts if isinstance(module, MixtureOfExperts) else LightningModule
    hooks = _MODULE_HOOKS + (("training_step",) if base is MixtureOfExperts else ())
    return [name for name in hooks if is_overridden(module, name, base)]


def is_overridden(module: LightningModule, name: str, base: type[LightningModule] = LightningModule) -> bool:
    """Whether the module's class overrides a method of the base, or the module itself was given one."""
    return name in vars(module) or getattr(type(module), name) is not getattr(base, name)


def needs_every_batch(training: LocalTraining) -> str | None:
    """The reason why each client's Trainer must see its batches; None if a bare loop may train it."""
    for name, value in training.trainer.items():
        is_all = name == "limit_train_batches" and isinstance(value, float) and value == 1  # an integer 1 is one batch
        if not (is_all or name in _ANY_VALUE or value in _SOME_VALUES.get(name, (TRAINER_DEFAULTS[name],))):
            return f"trainer.{name} is set"
    if training.trainer.get("callbacks"):
        return "each client needs its own copy of trainer.callbacks"
    if not trains_by_loss(training):
        return f"{type(training.module).__name__} has its own training_step or hooks"
    try:
        configured = training.module.configure_optimizers()
    except Exception as error:  # the method may need its Trainer
        return f"configure_optimizers needs more than the model ({type(error).__name__}: {error})"
    optimizer, _ = optimizer_and_scheduler(configured)
    if optimizer is None:
        return "configure_optimizers returns more than an optimizer and a scheduler stepped once per epoch"
    return None


class NeedsTrainerError(Exception):
    """A loss or ``client_final`` reads or sets an attribute of its Trainer, the argument, that a bare loop lacks."""

    def __str__(self) -> str:
        return f"the training reads or sets {self.args[0]} of its Trainer, which only a Trainer for each client has"


def needs_trainer(result: Any) -> bool:
    """Whether what the training of a client gave is the failure of one that needs a Trainer of its own."""
    return isinstance(getattr(result, "error", None), NeedsTrainerError)


class OneStep(LightningModule):
    """Calls a function in its only training step: it runs under the Trainer's settings without its cost per batch."""

    def __init__(self, training: LocalTraining, function: Callable[[OneStep], None]) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.is_mixed = training.in_half_precision
        self.function = function

    def configure_optimizers(self) -> None:
        """Returns none, because what the function trains has its own."""

    def training_step(self, batch: int, batch_idx: int) -> None:
        """Calls the function without autocast, because only losses use the Trainer's precision; see :class:`Loop`."""
        with torch.autocast(self.device.type, enabled=False) if self.is_mixed else nullcontext():
            self.function(self)


def in_one_step(training: LocalTraining, function: Callable[[OneStep], None]) -> None:
    """Calls a function that trains some clients inside one training step of a Trainer."""
    # Lightning refuses clipping with manual optimization, and a summary would show OneStep instead of the model
    changed: dict[str, Any] = {"gradient_clip_val": None, "gradient_clip_algorithm": None}
    changed |= {"max_epochs": 1, "enable_model_summary": False}
    discard(fit(training, OneStep(training, function), range(1), None, [], **changed))


class Learner(ABC):
    """What a bare loop trains: a client, or a stack of clients.

    Attributes:
        module: the module whose loss is computed.
        counts_steps: whether every client takes a step whenever the loop does.
    """

    module: LightningModule
    counts_steps: bool = True

    @abstractmethod
    def epoch(self) -> Iterable[Any]:
        """The batches of the next epoch; called after ``Freezing`` has frozen what it does not train."""

    def configure_optimizers(self) -> Any:
        """What the module's ``configure_optimizers`` returns, for the tensors that are actually trained."""
        return self.module.configure_optimizers()

    @abstractmethod
    def loss(self, batch: Any) -> Any:
        """What ``backward`` needs for a batch, usually its loss, of shape (); None to leave the batch out."""

    @abstractmethod
    def backward(self, loss: Any, optimizer: torch.optim.Optimizer) -> None:
        """Sets and clips the gradients of the optimizer's parameters, which are None before."""


class _StandIn:
    """Poses as the Trainer of a module, and refuses what only a client's own Trainer has.

    Attributes:
        refused: the last such attribute that was read or set, even if whoever did so caught the error.
    """

    __slots__ = ("refused",)  # no other attribute can be set

    def __init__(self) -> None:
        self.refused = ""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself reads such names, for example to copy
            raise AttributeError(name)
        self._refuse(name)

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, value)
        except AttributeError:
            self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        self.refused = name
        raise NeedsTrainerError(name)

    @contextmanager
    def attached(self, module: LightningModule) -> Iterator[None]:
        """In this context, it is the module's Trainer; raises a ``NeedsTrainerError`` if it refused anything."""
        module.trainer = self  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        except Exception:
            if self.refused:
                raise NeedsTrainerError(self.refused) from None
            raise
        finally:
            module.trainer = None
        if self.refused:
            raise NeedsTrainerError(self.refused)


class EndedTraining(_StandIn):
    """Poses as the Trainer of a client's module when a bare loop or a stack has trained the client for some epochs."""

    __slots__ = ("current_epoch", "global_step")

    def __init__(self, client: Client, epochs: int) -> None:
        super().__init__()
        self.global_step = client.steps
        self.current_epoch = epochs


class Loop(_StandIn):
    """Trains a learner for all epochs, and poses as the Trainer of its module.

    Attributes:
        steps: the number of optimizer steps so far.
        epoch: the epoch, from 0.
        called: whether the optimizer has called the closure of this step.
    """

    __slots__ = ("called", "counts_steps", "device_type", "epoch", "freezing", "is_mixed", "steps", "trainer")

    def __init__(self, trainer: Trainer, training: LocalTraining, freezing: Freezing) -> None:
        super().__init__()
        self.trainer = trainer
        self.device_type = training.device.type
        self.is_mixed = training.in_half_precision
        self.freezing = freezing
        self.epoch = self.steps = 0
        self.counts_steps = True
        self.called = False

    # properties without setters, as in a Trainer

    @property
    def max_epochs(self) -> int:
        """The number of the client's epochs."""
        return self.freezing.epochs

    @property
    def current_epoch(self) -> int:
        """The epoch, from 0."""
        return self.epoch

    @property
    def global_step(self) -> int:
        """The number of the client's steps so far."""
        return self.steps if self.counts_steps else self._refuse("global_step")

    def __getattr__(self, name: str) -> Any:
        """Attributes that are the same in all Trainers; others would describe the Trainer around the loop."""
        return getattr(self.trainer, name) if name in _SAME_IN_ALL else super().__getattr__(name)

    def run(self, learner: Learner) -> torch.optim.Optimizer:
        """Trains all epochs; returns the optimizer."""
        self.counts_steps = learner.counts_steps
        with self.attached(learner.module):
            return self._run(learner)

    def _run(self, learner: Learner) -> torch.optim.Optimizer:
        optimizer, scheduler = optimizer_and_scheduler(learner.configure_optimizers())
        assert optimizer is not None, "needs_every_batch has refused it"
        for epoch in range(self.freezing.stop_after):
            self.epoch = epoch
            self.freezing.freeze(epoch)
            for batch in learner.epoch():
                self.called = False
                optimizer.step(closure=partial(self._closure, learner, optimizer, batch))
                if not self.called:
                    raise MisconfigurationException(
                        f"{type(optimizer).__name__}: a step did not call the closure that it was given, but must do "
                        "so at least once, because the closure computes the loss and its gradients."
                    )
                self.steps += 1
            if scheduler is not None:
                scheduler.step()
            self.freezing.unfreeze()
        return optimizer

    @torch.enable_grad()
    def _closure(self, learner: Learner, optimizer: torch.optim.Optimizer, batch: Any) -> Any:
        """The closure that Lightning passes to ``optimizer.step``, which may call it more than once."""
        self.called = True
        with torch.autocast(self.device_type, torch.bfloat16) if self.is_mixed else nullcontext():
            loss = learner.loss(batch)
        if self.is_mixed:
            torch.clear_autocast_cache()  # the cache holds half-precision copies of the parameters before the step
        optimizer.zero_grad()
        if loss is not None:
            learner.backward(loss, optimizer)
        return loss
