"""Locks on folders: one process at a time trains a run, for example."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.checkpoints.checkpoint import is_of_run
from fedmoe_pl.checkpoints.writing import unwritable


@contextmanager
def exclusive(path: Path, taken: str, unusable: Callable[[OSError], Exception]) -> Iterator[None]:
    """Keeps other processes from a lock until this context ends.

    The kernel ends the lock with the process, also when it is killed. Worker processes do not have it.
    """
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise MisconfigurationException(taken) from error
    except OSError as error:
        raise unusable(error) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def locked(checkpoint: Path) -> Iterator[None]:
    """Keeps other processes from training the run."""
    if not is_of_run(checkpoint):
        yield
        return
    path = checkpoint.with_name("lock")
    taken = f"ckpt_path is '{checkpoint}', but another process trains this run now; wait until it ends, or end it."
    with exclusive(path, taken, lambda error: unwritable(path, error)):
        yield
