"""A process that has imported everything and from which worker processes are forked."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.util import _args_from_interpreter_flags  # pyright: ignore[reportAttributeAccessIssue]

from fedmoe_pl.backends.workers.worker import WORKER_ENVIRONMENT

FORKS = sys.platform == "linux"
"""Whether workers can be forked. On other systems, libraries of the system do not survive that."""

_PROGRAM = """
import gc, sys
gc.disable()
sys.path[:] = {path!r}
from fedmoe_pl.backends.workers.fork_server import serve
from fedmoe_pl.backends.workers.process import work
serve({control}, work)
"""
_server: ForkServer | None = None


class ForkServer:
    """Forks workers for this process, and ends with it.

    A fork is ready at once and shares the memory of everything imported. It is safe, because the server runs no thread
    and never uses a GPU. It has the environment that workers need, and does not import the user's script, which needs
    no guard therefore; multiprocessing's own server belongs to the user's code.
    """

    def __init__(self) -> None:
        self.driver = os.getpid()
        self.control, theirs = socket.socketpair()
        program = _PROGRAM.format(path=sys.path, control=theirs.fileno())
        # Ctrl-C is for the driver, which ends its workers. A process started while the signal is blocked never gets it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self.process = subprocess.Popen(
                [sys.executable, *_args_from_interpreter_flags(), "-c", program],
                stdin=subprocess.DEVNULL,
                env={**os.environ, **WORKER_ENVIRONMENT},
                pass_fds=[theirs.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        atexit.register(self.close)

    @property
    def is_alive(self) -> bool:
        """Whether it runs and belongs to this process, which may be a fork of the one that started it."""
        return self.driver == os.getpid() and self.process.poll() is None

    @property
    def is_ready(self) -> bool:
        """Whether it has imported everything."""
        return bool(wait([self.control], 0))

    def connect(self) -> socket.socket:
        """A connection to a new worker, which starts when the server is ready."""
        ours, theirs = socket.socketpair()
        with theirs, suppress(ConnectionError):  # if the server has just died, so has the worker
            socket.send_fds(self.control, [b"\0"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Ends the server and its workers."""
        if not self.is_alive:
            return
        if not self.is_ready:  # it would only notice after its imports
            self.process.kill()
        self.control.close()
        self.process.wait()


def start_server() -> ForkServer:
    """Starts this process's server if it does not run; it does not wait until it is ready."""
    global _server
    if _server is None or not _server.is_alive:
        _server = ForkServer()
    return _server


def is_server_ready() -> bool:
    """Whether this process has a server that has imported everything."""
    return _server is not None and _server.is_alive and _server.is_ready


def serve(control: int, work: Callable[[socket.socket], None]) -> None:
    """Forks a worker at each request of the driver, and kills those that are left when the driver ends; the server."""
    gc.collect()
    gc.freeze()  # a worker's collections would write to all imported objects, and so copy their memory
    gc.enable()
    driver = socket.socket(fileno=control)
    workers: set[int] = set()
    with suppress(ConnectionError):
        driver.send(b"\0")
        while connections := socket.recv_fds(driver, 1, 1)[1]:
            worker = os.fork()
            if not worker:
                driver.close()
                run_worker(work, socket.socket(fileno=connections[0]))
            workers = {worker, *(other for other in workers if not os.waitpid(other, os.WNOHANG)[0])}
            os.close(connections[0])
    for worker in workers:
        os.kill(worker, signal.SIGKILL)
        os.waitpid(worker, 0)
    os._exit(0)  # what libraries do at an exit is for those who used them


def run_worker(work: Callable[[socket.socket], None], connection: socket.socket) -> None:
    """Is a worker, and does not return."""
    try:
        work(connection)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
