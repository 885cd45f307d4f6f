"""Decides whether clients train with the algorithm's loss or with the hooks of the user's module."""

from __future__ import annotations

from lightning.pytorch import LightningModule

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.models import MixtureOfExperts

BATCH_HOOKS = (
    *("on_train_batch_start", "on_train_batch_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"),
    *("on_before_optimizer_step",),
)
"""Hooks of modules and callbacks that Lightning calls at every batch."""

_MODULE_HOOKS = (
    *BATCH_HOOKS,
    *("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_train_epoch_start", "on_train_epoch_end"),
    *("on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end"),
    *("on_validation_batch_start", "on_validation_batch_end", "validation_step", "backward", "optimizer_step"),
    *("optimizer_zero_grad", "lr_scheduler_step", "configure_gradient_clipping", "configure_callbacks"),
    *("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"),
)


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
