"""Worker processes on this machine: the driver's end, the worker's end, and the backend that starts them."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import wait
from traceback import format_exception
from typing import Any

import cloudpickle
import torch

from fedmoe_pl.backends.backend import Backend
from fedmoe_pl.backends.failures import portable
from fedmoe_pl.backends.workers.fork_server import is_server_ready, start_server
from fedmoe_pl.backends.workers.pickling import SharedObject
from fedmoe_pl.backends.workers.workers_backend import (
    WORKER_ENVIRONMENT,
    RemoteWorker,
    Worker,
    WorkerDied,
    WorkersBackend,
)
from fedmoe_pl.data import FederatedDataModule

_IDLE = 0.5  # seconds without work after which a worker returns freed memory to the system


class LocalWorker(RemoteWorker):
    """The driver's end of a worker. A thread sends each call and waits for its answer."""

    def __init__(self, data: SharedObject, device: torch.device, **environment: str) -> None:
        super().__init__(device)
        self.connection = start_server().connect()
        self.stream = self.connection.makefile("rwb")
        self.thread = ThreadPoolExecutor(1)
        here = sys.path, sys.argv, os.getcwd(), {**os.environ, **environment}
        self.pid = self.thread.submit(self._call, here, data, device)

    def submit(self, phase: SharedObject | None, server: bytes | None, groups: bytes) -> Future[Any]:
        """Queues a call, which is sent after the previous call has been answered."""
        return self.thread.submit(self._call, phase, server, groups)

    def _call(self, *message: Any) -> Any:
        try:
            pickle.dump(message, self.stream)
            self.stream.flush()
            result, failure = pickle.load(self.stream)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise WorkerDied(type(error).__name__) from error
        if failure is None:
            return result
        error, trace = pickle.loads(failure)
        error.__cause__ = RuntimeError(f"in the worker process:\n{trace}")
        raise error

    def end(self) -> None:
        """Kills the process."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # a process that is idle or has not started yet ends at once
        self.thread.shutdown()
        if self.pid.exception() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid.result(), signal.SIGKILL)
        with suppress(OSError):
            self.stream.close()
        self.connection.close()


def work(connection: socket.socket) -> None:
    """Runs the worker's end: answers calls until the driver ends or closes the connection."""
    stream = connection.makefile("rwb")
    # for a DataLoader's processes, which could not unpickle classes of the user's script if they were not forked
    multiprocessing.set_start_method("fork", force=True)
    worker = None
    with suppress(EOFError, ConnectionError):
        (sys.path[:], sys.argv[:], folder, environment), data, device = pickle.load(stream)
        os.chdir(folder)
        os.environ.update({**environment, **WORKER_ENVIRONMENT})
        answer: tuple[Any, bytes | None] = os.getpid(), None
        while True:
            pickle.dump(answer, stream)
            stream.flush()
            if not wait([connection], _IDLE) and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
                trim(0)  # returns freed memory, which glibc would keep, to the system
            phase, server, groups = pickle.load(stream)
            try:
                worker = worker or Worker(data.load(), device)
                answer = worker.work(phase and phase.content(), server, groups), None
            except Exception as error:
                answer = None, cloudpickle.dumps((portable(error), "".join(format_exception(error))))


_WORTH_FORKING = 1.0  # seconds to gain from forking workers
_WORTH_A_SERVER = 5.0  # seconds to gain from starting the server, which imports for as long, on another core


class PoolBackend(WorkersBackend):
    """One process per device of this machine.

    Args:
        backend: how each process trains its groups.
        devices: the device of each process; on a CPU, the same device several times.
        lazy: whether training begins in this process. Workers are prepared once they would shorten the phase by five
            seconds at the pace measured so far, and take over when ready if that still saves a second. The result is
            bit-identical.
    """

    def __init__(self, backend: Backend, devices: Sequence[torch.device], lazy: bool = False) -> None:
        super().__init__(backend, devices, lazy, f", in up to {len(devices)} processes")

    def open(self) -> None:
        """Starts the fork server, which imports everything while the run is prepared."""
        if not self.lazy:
            start_server()

    def is_worth_starting(self, gain: float) -> bool:
        """Whether to start the processes; starts the fork server if that is worth it, without waiting for it."""
        if not is_server_ready() and gain >= _WORTH_A_SERVER:
            start_server()
        return is_server_ready() and gain >= _WORTH_FORKING

    def share(self, obj: Any, datamodule: FederatedDataModule | None = None) -> SharedObject:
        """Writes an object to a file that all workers map."""
        return SharedObject(obj, datamodule)

    def start_worker(self, device: torch.device) -> RemoteWorker:
        """Starts a process."""
        return LocalWorker(self.data, device)
