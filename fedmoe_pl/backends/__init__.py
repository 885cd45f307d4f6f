"""Backends: how and where clients are trained."""

from fedmoe_pl.backends.auto import AutoBackend
from fedmoe_pl.backends.backend import Backend, GroupUpdate, Plan
from fedmoe_pl.backends.failures import Failure, NotFiniteError, check_finite, guarded
from fedmoe_pl.backends.fitting import LEAN_TRAINER, one_thread, packages_read_once, quiet
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.backends.local_client import TRAINED, begin_client, client_of, data_on, on_device, trainable_names
from fedmoe_pl.backends.loop import is_overridden, overridden_hooks, trains_by_loss
from fedmoe_pl.backends.stacked import StackedBackend
from fedmoe_pl.backends.traffic import Transfer
from fedmoe_pl.backends.trainer import TrainerBackend
from fedmoe_pl.backends.training import LocalTraining, is_distributed
from fedmoe_pl.backends.workers import DistributedBackend, PoolBackend, RayBackend, WorkersBackend

__all__ = [
    "LEAN_TRAINER",
    "TRAINED",
    "AutoBackend",
    "Backend",
    "DistributedBackend",
    "Failure",
    "Freezing",
    "GroupUpdate",
    "LocalTraining",
    "NotFiniteError",
    "Plan",
    "PoolBackend",
    "RayBackend",
    "StackedBackend",
    "TrainerBackend",
    "Transfer",
    "WorkersBackend",
    "begin_client",
    "check_finite",
    "client_of",
    "data_on",
    "guarded",
    "is_distributed",
    "is_overridden",
    "on_device",
    "one_thread",
    "overridden_hooks",
    "packages_read_once",
    "quiet",
    "trainable_names",
    "trains_by_loss",
]
