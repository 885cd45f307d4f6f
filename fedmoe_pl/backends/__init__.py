"""Backends: where and how clients are trained."""

from fedmoe_pl.backends.backend import Backend, GroupUpdate, LocalTraining
from fedmoe_pl.backends.trainer import LEAN_TRAINER, TrainerBackend, changes_loss, has_batch_norm, one_thread, quiet

__all__ = [
    "LEAN_TRAINER",
    "Backend",
    "GroupUpdate",
    "LocalTraining",
    "TrainerBackend",
    "changes_loss",
    "has_batch_norm",
    "one_thread",
    "quiet",
]
