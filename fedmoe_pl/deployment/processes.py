"""Flower's own processes, as children of ours."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedmoe_pl.checkpoints.lock import exclusive
from fedmoe_pl.checkpoints.writing import cannot_be_made, unwritable

_PR_SET_PDEATHSIG = 1  # of prctl(2)
# no telemetry, no look for updates, no installation of packages
_QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


@contextmanager
def own_folder(folder: Path) -> Iterator[None]:
    """Makes a folder for Flower's files, and keeps other processes from it until this context ends."""
    taken = f"Another process uses '{folder}'; end that one first."
    with exclusive(folder / "lock", taken, lambda error: cannot_be_made(folder, error)):
        yield


@contextmanager
def private(folder: Path) -> Iterator[None]:
    """Makes a folder that no other user of the machine can enter, nor read what this process writes meanwhile."""
    before = os.umask(0o077)
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
        except OSError as error:
            raise unwritable(folder, error) from error
        yield
    finally:
        os.umask(before)


@contextmanager
def child(command: list[str], log: Path, home: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process of Flower, which ends with this context."""
    environment = {**os.environ, **_QUIET, "FLWR_HOME": str(home / "flower"), "PYTHONUNBUFFERED": "1"}
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, preexec_fn=_end_with_parent
        )
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _end_with_parent() -> None:
    """Has the kernel end this process with its parent, however that ends: a SuperNode would keep its place."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
