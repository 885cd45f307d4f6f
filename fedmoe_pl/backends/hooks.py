"""Decides whether clients train with the algorithm's loss or the user's hooks, in a bare loop or batch by batch."""

from __future__ import annotations

import inspect
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.backends.fitting import LEAN_TRAINER
from fedmoe_pl.backends.optimizers import optimizer_and_scheduler
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.models import MixtureOfExperts

_MODULE_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step", "on_fit_start", "on_fit_end", "on_train_start", "on_train_end"),
    *("on_train_epoch_start", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_validation_batch_start", "on_validation_batch_end", "validation_step", "backward", "optimizer_step"),
    *("optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping", "configure_callbacks"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)
# Arguments that the bare loop respects or that do not matter in a step. Any other argument must have its default.
_LEAN_ARGUMENTS = {
    *("accelerator", "devices", "max_epochs", "precision", "gradient_clip_val", "gradient_clip_algorithm", "callbacks"),
    *("enable_model_summary", "num_sanity_val_steps", "limit_val_batches", "check_val_every_n_epoch"),
    *("log_every_n_steps", "deterministic", "benchmark", "inference_mode", "default_root_dir"),
    "enable_autolog_hparams",
}
_LEAN_PRECISIONS = (None, 32, "32", "32-true", "bf16", "bf16-mixed")


def changes_loss(algorithm: Algorithm) -> bool:
    """Whether the algorithm has its own local loss, for which the module must have a method ``loss(batch)``."""
    return type(algorithm).client_loss is not Algorithm.client_loss


def trains_by_loss(algorithm: Algorithm, module: LightningModule) -> bool:
    """Whether clients train with ``Algorithm.client_loss`` and not with the module's ``training_step``."""
    if changes_loss(algorithm):
        return True
    return isinstance(module, MixtureOfExperts) and not overridden_hooks(module)


def overridden_hooks(module: LightningModule) -> list[str]:
    """The Lightning hooks that a user's module overrides and that training with ``client_loss`` would not call."""
    base = MixtureOfExperts if isinstance(module, MixtureOfExperts) else LightningModule
    hooks = _MODULE_HOOKS + (("training_step",) if base is MixtureOfExperts else ())
    return [name for name in hooks if getattr(type(module), name) is not getattr(base, name)]


def needs_every_batch(training: LocalTraining) -> str | None:
    """The reason why each client's Trainer must see its batches; None if a bare loop may train it."""
    defaults = {name: parameter.default for name, parameter in inspect.signature(Trainer).parameters.items()}
    for name, value in training.trainer.items():
        lean = name in _LEAN_ARGUMENTS or value == LEAN_TRAINER.get(name, defaults[name])
        if not lean or (name == "precision" and value not in _LEAN_PRECISIONS):
            return f"trainer.{name} is {shown(value)}"
    if training.trainer.get("callbacks"):
        return "each client needs its own copy of trainer.callbacks"
    if not trains_by_loss(training.algorithm, training.module):
        return f"{type(training.module).__name__} has its own training_step or hooks"
    try:
        configured = training.module.configure_optimizers()
    except Exception as error:  # it may need its Trainer
        return f"configure_optimizers needs more than the model ({type(error).__name__}: {error})"
    optimizer, _ = optimizer_and_scheduler(configured)
    if optimizer is None:
        return "configure_optimizers returns more than an optimizer and a scheduler stepped once per epoch"
    if inspect.signature(type(optimizer).step).parameters["closure"].default is inspect.Parameter.empty:
        return f"{type(optimizer).__name__} needs a closure"
    return None


def shown(value: Any) -> str:
    """A value of the configuration; an object, such as a logger, as its class."""
    if isinstance(value, list | tuple):
        return ", ".join(map(shown, value))
    return type(value).__name__ if type(value).__repr__ is object.__repr__ else str(value)
