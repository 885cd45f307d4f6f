"""Backends: how and where clients are trained."""

from fedmoe_pl.backends.auto import AutoBackend
from fedmoe_pl.backends.backend import Backend, GroupUpdate, LocalTraining, Plan
from fedmoe_pl.backends.client import (
    LEAN_TRAINER,
    changes_loss,
    data_on,
    has_batch_norm,
    one_thread,
    overridden_hooks,
    quiet,
)
from fedmoe_pl.backends.cluster import RayBackend
from fedmoe_pl.backends.pool import PoolBackend
from fedmoe_pl.backends.stacked import StackedBackend
from fedmoe_pl.backends.trainer import TrainerBackend
from fedmoe_pl.backends.workers import WorkersBackend

__all__ = [
    "LEAN_TRAINER",
    "AutoBackend",
    "Backend",
    "GroupUpdate",
    "LocalTraining",
    "Plan",
    "PoolBackend",
    "RayBackend",
    "StackedBackend",
    "TrainerBackend",
    "WorkersBackend",
    "changes_loss",
    "data_on",
    "has_batch_norm",
    "one_thread",
    "overridden_hooks",
    "quiet",
]
