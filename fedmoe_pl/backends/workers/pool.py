"""Worker processes on this machine."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import IO, Any

import cloudpickle
import loky
import torch
from loky.process_executor import TerminatedWorkerError

from fedmoe_pl.backends.backend import Backend
from fedmoe_pl.backends.workers.pickling import sendable
from fedmoe_pl.backends.workers.worker import WORKER_ENVIRONMENT, Worker
from fedmoe_pl.backends.workers.workers_backend import RemoteWorker, WorkerDied, WorkersBackend
from fedmoe_pl.data import FederatedDataModule

# otherwise loky replaces a process that has grown by 300 MB since its first call, and loses what was sent to it
_ENVIRONMENT = {**WORKER_ENVIRONMENT, "LOKY_MAX_MEMORY_LEAK_SIZE": "1e18"}


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
        self._data: IO[bytes] | None = None

    def share(self, datamodule: FederatedDataModule) -> None:
        """Writes the data to a file that all workers map."""
        # a file without a name, because it is deleted however this process ends
        self._data = data = tempfile.TemporaryFile()
        sendable("the data module", lambda: torch.save(datamodule, data, pickle_module=cloudpickle))
        data.flush()

    def start_worker(self, device: torch.device) -> RemoteWorker:
        """Starts a process."""
        assert self._data is not None, "the data are shared first"
        return _Process(f"/proc/{os.getpid()}/fd/{self._data.fileno()}", device)

    def close(self) -> None:
        """Ends the processes and frees the file."""
        super().close()
        if self._data is not None:
            self._data.close()
        self._data = None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the file, which belongs to this process."""
        return {**super().__getstate__(), "_data": None}


class _Process(RemoteWorker):
    """A process started by loky: a new interpreter, so that the user's script needs no ``__main__`` guard."""

    def __init__(self, data: str, device: torch.device) -> None:
        super().__init__(device)
        self.data = data
        self.executor = loky.ProcessPoolExecutor(1, env=_ENVIRONMENT, initializer=_end_with, initargs=(os.getpid(),))
        # Ctrl-C is for the driver, which ends its workers. A process started while the signal is blocked never gets it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self.executor.submit(os.getpid)  # so that it imports modules while others start
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def submit(self, phase: bytes | None, server: bytes | None, groups: bytes) -> Future[Any]:
        try:
            return self.executor.submit(_work, self.data, self.device, phase, server, groups)
        except TerminatedWorkerError as error:  # the process died while it was idle
            future: Future[Any] = Future()
            future.set_exception(error)
            return future

    def result(self, future: Future[Any]) -> bytes:
        try:
            return future.result()
        except TerminatedWorkerError as error:
            raise WorkerDied(type(error).__name__) from error

    def end(self) -> None:
        self.executor.shutdown(kill_workers=True)


_worker: Worker | None = None  # in a worker process


def _work(data: str, device: torch.device, phase: bytes | None, server: bytes | None, groups: bytes) -> bytes:
    """Works for some groups; runs in the worker's process."""
    global _worker
    if _worker is None:
        _worker = Worker(torch.load(data, mmap=True, weights_only=False), device)
    return _worker.work(phase, server, groups)


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended, in case the parent could not do so."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
