"""Both ends of a worker process on this machine."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import signal
import socket
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import wait
from traceback import format_exception
from typing import Any

import cloudpickle
import torch

from fedmoe_pl.backends.failures import portable
from fedmoe_pl.backends.workers.fork_server import start_server
from fedmoe_pl.backends.workers.shared import SharedObject
from fedmoe_pl.backends.workers.worker import WORKER_ENVIRONMENT, Worker
from fedmoe_pl.backends.workers.workers_backend import RemoteWorker, WorkerDied

_IDLE = 0.5  # seconds without work, after which a worker gives its freed memory back


class LocalWorker(RemoteWorker):
    """The driver's end. A thread sends each call and waits for its answer."""

    def __init__(self, data: SharedObject, device: torch.device, **environment: str) -> None:
        super().__init__(device)
        self.connection = start_server().connect()
        self.stream = self.connection.makefile("rwb")
        self.thread = ThreadPoolExecutor(1)
        here = sys.path, sys.argv, os.getcwd(), {**os.environ, **environment}
        self.pid = self.thread.submit(self._call, here, data, device)

    def submit(self, phase: SharedObject | None, server: bytes | None, groups: bytes) -> Future[Any]:
        """Sends a call when the answer to the last one has come."""
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

    def result(self, future: Future[Any]) -> bytes:
        """The answer, or what the call raised."""
        return future.result()

    def end(self) -> None:
        """Kills the process."""
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)  # a process that has not started or is idle ends at once
        self.thread.shutdown()
        if self.pid.exception() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid.result(), signal.SIGKILL)
        with suppress(OSError):
            self.stream.close()
        self.connection.close()


def _return_freed_memory() -> None:
    """Returns to the system what was freed, which malloc keeps for later; does nothing without glibc."""
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def work(connection: socket.socket) -> None:
    """Answers the driver's calls until it ends or closes the connection; the worker's end."""
    stream = connection.makefile("rwb")
    # for the processes of a DataLoader; in others, classes of the user's script could not be unpickled
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
            if not wait([connection], _IDLE):
                _return_freed_memory()
            phase, server, groups = pickle.load(stream)
            try:
                worker = worker or Worker(data.load(), device)
                answer = worker.work(phase and phase.content(), server, groups), None
            except Exception as error:
                answer = None, cloudpickle.dumps((portable(error), "".join(format_exception(error))))
