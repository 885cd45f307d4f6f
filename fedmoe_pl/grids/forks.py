"""Processes of cells that are forked from one that has imported everything, so that no cell imports it again."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.util import _flush_std_streams  # pyright: ignore[reportAttributeAccessIssue]
from pathlib import Path

import torch
from threadpoolctl import threadpool_limits

_server: socket.socket | None = None  # its end in this process


class ForkedProcess:
    """A process that runs a command of ``fedmoe``, with the methods of ``Popen`` that are needed here."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.pid: int = connection.recv()
        self._returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code; None as long as it runs."""
        return self.wait() if self._returncode is not None or self.connection.poll() else None

    def wait(self) -> int:
        """Waits until it has ended, and returns its exit code, which is -n if signal n ended it."""
        if self._returncode is None:
            self._returncode = int(self.connection.recv())
            self.connection.close()
        return self._returncode

    def terminate(self) -> None:
        """Sends SIGTERM."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)


def serve_forks() -> None:
    """Forks a server from this process, which forks a process for each command that :func:`fork` names.

    It returns here, and in the process of each command, whose ``sys.argv`` then names it. That process goes on as a new
    one does after its imports, and ends as a new one does: libraries' exit handlers run. Only for a process that has
    done nothing but import.
    """
    global _server
    ours, theirs = socket.socketpair()
    _flush_std_streams()  # otherwise what is buffered would be written once more
    if os.fork():
        theirs.close()
        _server = ours
        return
    ours.close()
    os.setsid()  # Ctrl-C reaches only the process that has forked this one
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who wait for a command
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):  # who reads what the first process writes need not wait for a process that outlives it
        os.dup2(nothing, stream)
    while ends := socket.recv_fds(theirs, 1, 1)[1]:
        if not os.fork():
            theirs.close()
            _begin(Connection(ends[0]))
            return
        os.close(ends[0])
    os._exit(0)


def fork(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], cores: Sequence[int]
) -> ForkedProcess | None:
    """Runs a command, such as ``["fit", "--config", ...]``, in a process of its own; None where no server runs.

    Args:
        command: the arguments of ``fedmoe``.
        folder: gets its ``stdout.log``, which is continued, and its ``stderr.log``.
        environment: variables that it has in addition.
        cores: those that it uses; none for all.
    """
    if _server is None:
        return None
    ours, theirs = Pipe()
    try:
        with theirs:
            socket.send_fds(_server, [b"\0"], [theirs.fileno()])
        ours.send((command, folder, environment, cores))
        return ForkedProcess(ours)
    except (EOFError, ConnectionError):  # something has killed the server
        return None


def _begin(connection: Connection) -> None:
    """Forks the process of a command, and returns in it; this one tells its number and its exit code."""
    command, folder, environment, cores = connection.recv()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if pid := os.fork():
        with suppress(ConnectionError):  # nobody is left to be told
            connection.send(pid)
            connection.send(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        os._exit(0)
    connection.close()
    os.setsid()
    for stream, name, flag in ((1, "stdout.log", os.O_APPEND), (2, "stderr.log", os.O_TRUNC)):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT | flag, 0o666)
        os.dup2(file, stream)
        os.close(file)
    os.environ.update(environment)
    if cores:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))  # as a new process would count them
        threadpool_limits(len(cores))
    sys.argv[1:] = command
