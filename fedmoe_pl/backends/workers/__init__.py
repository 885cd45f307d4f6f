"""Trains groups of clients in worker processes, on this machine or in a Ray cluster."""

from fedmoe_pl.backends.workers.distributed import DistributedBackend
from fedmoe_pl.backends.workers.process import PoolBackend
from fedmoe_pl.backends.workers.ray import RayBackend
from fedmoe_pl.backends.workers.workers_backend import WorkersBackend, WorkersPlan

__all__ = ["DistributedBackend", "PoolBackend", "RayBackend", "WorkersBackend", "WorkersPlan"]
