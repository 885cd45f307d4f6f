"""The lock on a run's folder: one process trains a run at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.rounds.checkpoint import is_of_run
from fedmoe_pl.rounds.writing import unwritable


@contextmanager
def locked(checkpoint: Path) -> Iterator[None]:
    """Keeps other processes from training the run.

    The kernel ends the lock with the process, also when it is killed. Worker processes do not have it.

    Args:
        checkpoint: a checkpoint of the run; nothing is locked if it is not in a folder where a run writes its own.

    Raises:
        MisconfigurationException: if another process trains the run, or the folder cannot be written.
    """
    if not is_of_run(checkpoint):
        yield
        return
    path = checkpoint.with_name("lock")
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout as error:
        raise MisconfigurationException(
            f"ckpt_path is '{checkpoint}', but another process trains this run now; wait until it ends, or end it."
        ) from error
    except OSError as error:
        raise unwritable(path, error) from error
    try:
        yield
    finally:
        lock.release()
