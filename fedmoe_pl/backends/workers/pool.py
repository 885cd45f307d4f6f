"""Worker processes on this machine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fedmoe_pl.backends.backend import Backend
from fedmoe_pl.backends.workers.fork_server import is_server_ready, start_server
from fedmoe_pl.backends.workers.process import LocalWorker
from fedmoe_pl.backends.workers.shared import SharedObject
from fedmoe_pl.backends.workers.workers_backend import RemoteWorker, WorkersBackend
from fedmoe_pl.data import FederatedDataModule

_WORTH_FORKING = 1.0  # seconds to gain
_WORTH_A_SERVER = 5.0  # seconds to gain; it imports for as long on another core, while this process goes on


class PoolBackend(WorkersBackend):
    """One process per device of this machine.

    Args:
        backend: how each of them trains its groups.
        devices: the device of each process; on a CPU the same device several times.
        lazy: whether training begins in this process. The others are prepared when, at the pace measured so far, they
            would shorten the phase by five seconds, and take over when they are ready, if a second can still be gained.
            The result has the same bits.
    """

    def __init__(self, backend: Backend, devices: Sequence[torch.device], lazy: bool = False) -> None:
        super().__init__(backend, devices, lazy, f", in up to {len(devices)} processes")

    def open(self) -> None:
        """Has the processes' server import everything while the run is prepared."""
        if not self.lazy:
            start_server()

    def is_worth_starting(self, gain: float) -> bool:
        """Whether to start the processes; has their server started if it is not there, without waiting for it."""
        if not is_server_ready() and gain >= _WORTH_A_SERVER:
            start_server()
        return is_server_ready() and gain >= _WORTH_FORKING

    def share(self, obj: Any, datamodule: FederatedDataModule | None = None) -> SharedObject:
        """Writes an object to a file that all workers map."""
        return SharedObject(obj, datamodule)

    def start_worker(self, device: torch.device) -> RemoteWorker:
        """Starts a process."""
        return LocalWorker(self.data, device)
