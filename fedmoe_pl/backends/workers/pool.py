"""Worker processes on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedmoe_pl.backends.backend import Backend
from fedmoe_pl.backends.workers.process import LocalWorker
from fedmoe_pl.backends.workers.shared import SharedObject
from fedmoe_pl.backends.workers.workers_backend import RemoteWorker, WorkersBackend
from fedmoe_pl.data import FederatedDataModule


class PoolBackend(WorkersBackend):
    """One process per device of this machine.

    Args:
        backend: how each of them trains its groups.
        devices: the device of each process; on a CPU the same device several times.
        lazy: whether training begins in this process. The others start when, at the pace measured so far, they are
            expected to shorten the phase by at least ten seconds. The result has the same bits.
    """

    def __init__(self, backend: Backend, devices: Sequence[torch.device], lazy: bool = False) -> None:
        super().__init__(backend, devices, lazy, f", in up to {len(devices)} processes")

    def share(self, obj: Any, datamodule: FederatedDataModule | None = None) -> SharedObject:
        """Writes an object to a file that all workers map."""
        return SharedObject(obj, datamodule)

    def start_worker(self, device: torch.device) -> RemoteWorker:
        """Starts a process."""
        return LocalWorker(self.data, device)
