"""Trains groups of clients in worker processes, on this machine or in a Ray cluster."""

from fedmoe_pl.backends.workers.backend import WorkersBackend, WorkersPlan
from fedmoe_pl.backends.workers.pool import PoolBackend
from fedmoe_pl.backends.workers.ray import RayBackend

__all__ = ["PoolBackend", "RayBackend", "WorkersBackend", "WorkersPlan"]
