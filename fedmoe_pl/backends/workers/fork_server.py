"""A process that has imported everything, and from which worker processes are forked."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.util import (
    _args_from_interpreter_flags,  # pyright: ignore[reportAttributeAccessIssue]
    _flush_std_streams,  # pyright: ignore[reportAttributeAccessIssue]
)

import torch
from threadpoolctl import threadpool_limits

from fedmoe_pl.backends.workers.workers_backend import WORKER_ENVIRONMENT

FORKS = sys.platform == "linux"
"""Whether workers can be forked. On systems other than Linux, system libraries do not survive a fork."""

_PROGRAM = """
import gc, sys
gc.disable()
sys.path[:] = {path!r}
from fedmoe_pl.backends.workers.fork_server import serve
from fedmoe_pl.backends.workers.process import work
serve({control}, work)
"""
_SIGNALS = [signal.SIGINT]  # Ctrl-C is meant for the driver, which ends its workers
# mallopt's parameter for each variable in WORKER_ENVIRONMENT that glibc reads only when a process starts
_MALLOC = {"MALLOC_TRIM_THRESHOLD_": -1, "MALLOC_TOP_PAD_": -2, "MALLOC_MMAP_THRESHOLD_": -3}
_server: ForkServer | None = None


class ForkServer:
    """Forks workers for this process, and ends with it.

    A fork is ready at once and shares the memory of everything imported. Forking is safe, because the server runs no
    thread and never uses a GPU. The server has the environment that workers need and does not import the user's script,
    which therefore needs no ``__main__`` guard. multiprocessing's own fork server is left to the user's code.

    Args:
        start: starts the server's process; called with this end and the server's end of a pair of connected sockets.
    """

    def __init__(self, start: Callable[[socket.socket, socket.socket], subprocess.Popen[bytes] | _Fork]) -> None:
        self.driver = os.getpid()
        self.control, theirs = socket.socketpair()
        # a process that is started while the signal is blocked never receives it
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        try:
            self.process = start(self.control, theirs)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        atexit.register(self.close)

    @property
    def _is_open(self) -> bool:
        return self.driver == os.getpid() and self.control.fileno() >= 0

    @property
    def is_alive(self) -> bool:
        """Whether the server runs and belongs to this process, which may be a fork of the one that started it."""
        if not self._is_open:
            return False
        hang_up = select.poll()  # a killed server hangs up a little before it can be waited for
        hang_up.register(self.control, 0)
        return not hang_up.poll(0)

    @property
    def is_ready(self) -> bool:
        """Whether the server has imported everything."""
        return bool(wait([self.control], 0))

    def connect(self) -> socket.socket:
        """Returns a connection to a new worker, which starts when the server is ready."""
        ours, theirs = socket.socketpair()
        with theirs, suppress(ConnectionError):  # if the server has just died, the worker appears to have died
            socket.send_fds(self.control, [b"\0"], [theirs.fileno()])
        return ours

    def close(self) -> None:
        """Ends the server and its workers."""
        if not self._is_open:
            return
        if not self.is_ready:  # the server would notice the closed connection only after its imports
            self.process.kill()
        self.control.close()
        self.process.wait()


class _Fork:
    """A fork of this process, with the methods of ``Popen`` that :class:`ForkServer` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        with suppress(ChildProcessError):  # where SIGCHLD is ignored, nothing is left to wait for
            os.waitpid(self.pid, 0)


def start_server() -> ForkServer:
    """Returns this process's server, started if it is not running; does not wait until it is ready."""
    global _server
    if _server is not None and not _server.is_alive:
        _server.close()
        _server = None
    _server = _server or ForkServer(_started)
    return _server


def fork_server(work: Callable[[socket.socket], None]) -> None:
    """Forks this process's server, which then need not import anything and shares the memory of what is imported here.

    Only for a process that has done nothing but import: it must not have used a GPU, nor have threads other than those
    of OpenBLAS, which ends them before a fork. Both keep the memory that they free, for the next batch.
    """
    global _server
    with suppress(AttributeError):  # only glibc has it
        for name, parameter in _MALLOC.items():
            ctypes.CDLL(None).mallopt(parameter, int(WORKER_ENVIRONMENT[name]))
    _server = ForkServer(partial(_forked, work))


def end_fork() -> None:
    """Ends a forked server that is not needed, which would keep a copy of all memory that this process changes."""
    if _server is not None and isinstance(_server.process, _Fork):
        _server.close()


def _started(_: socket.socket, control: socket.socket) -> subprocess.Popen[bytes]:
    """Starts the server in a new process."""
    program = _PROGRAM.format(path=sys.path, control=control.fileno())
    return subprocess.Popen(
        [sys.executable, *_args_from_interpreter_flags(), "-c", program],
        stdin=subprocess.DEVNULL,
        env={**os.environ, **WORKER_ENVIRONMENT},
        pass_fds=[control.fileno()],
    )


def _forked(work: Callable[[socket.socket], None], ours: socket.socket, control: socket.socket) -> _Fork:
    """Forks the server from this process, with the settings that a new process takes from its environment."""
    _flush_std_streams()  # otherwise workers would also write what is buffered
    if pid := os.fork():
        return _Fork(pid)
    try:
        ours.close()
        if nothing := os.open(os.devnull, os.O_RDONLY):  # is 0 if the command was started without standard input
            os.dup2(nothing, 0)
            os.close(nothing)
        os.environ.update(WORKER_ENVIRONMENT)
        torch.set_num_threads(int(WORKER_ENVIRONMENT["OMP_NUM_THREADS"]))
        threadpool_limits(int(WORKER_ENVIRONMENT["OMP_NUM_THREADS"]))  # for NumPy and SciPy
        serve(control.detach(), work)
    finally:
        os._exit(1)


def is_server_ready() -> bool:
    """Whether this process has a server that has imported everything."""
    return _server is not None and _server.is_alive and _server.is_ready


def serve(control: int, work: Callable[[socket.socket], None]) -> None:
    """Runs the server: forks a worker at each request, and kills the remaining workers when the driver ends."""
    gc.collect()
    gc.freeze()  # otherwise a worker's collections would write to all imported objects, which copies their memory
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
    os._exit(0)  # skips the exit handlers of libraries, which the server has not used


def run_worker(work: Callable[[socket.socket], None], connection: socket.socket) -> None:
    """Runs the worker; never returns."""
    try:
        work(connection)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)
