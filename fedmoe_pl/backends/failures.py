"""Lets a round go on without the clients whose training fails."""

from __future__ import annotations

import math
import pickle
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from traceback import clear_frames, format_exception
from types import FrameType
from typing import Any, TypeVar

import cloudpickle
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fedmoe_pl.aggregation.secure import OutOfRangeError
from fedmoe_pl.trees import Tree

Result = TypeVar("Result")
_RING_AGAIN_AFTER = 1.0  # seconds after which the alarm rings again, in case the client's code caught the first one


@dataclass(frozen=True)
class Failure:
    """Why a client is left out of a round: a short reason, and the exception that its training raised, if any.

    ``trace`` is the text of the exception's traceback if it was raised in another process. ``is_absent`` is True if
    nothing was sent to the client because its machine is not connected. ``kind`` is all that a client on another
    machine reports about a failure without an exception.
    """

    reason: str
    error: Exception | None = None
    trace: str = ""
    is_absent: bool = False
    kind: str = "training"

    def __reduce__(self) -> tuple[type[Failure], tuple[Any, ...]]:
        """Pickles the traceback as text, because another process can read it only in this form."""
        if self.error is None:
            return Failure, (self.reason, None, self.trace, False, self.kind)
        return Failure, (self.reason, portable(self.error), self.trace or "".join(format_exception(self.error)))


def portable(error: Exception) -> Exception:
    """The exception, or one with the same text if another process could not unpickle it."""
    try:
        pickle.loads(cloudpickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


class NotFiniteError(Exception):
    """The training of a client gave values that are not finite."""


class _Expired(BaseException):
    """A client's time limit was exceeded; not an Exception subclass, so that user code cannot catch it by accident."""


def guarded(call: Callable[[], Result], seconds: float | None) -> Result | Failure:
    """Calls a function that trains a client; returns a Failure if it raises an exception or takes too long.

    An alarm (``SIGALRM``) interrupts the function. Python handles alarms only in the main thread and between two of
    its own instructions: in another thread, or in a library call that hangs, only ending the process helps.
    """
    limited = seconds is not None and threading.current_thread() is threading.main_thread()
    try:
        return _call_within(seconds, call) if limited and seconds is not None else call()
    except MisconfigurationException:
        raise
    except (NotFiniteError, OutOfRangeError) as error:
        return Failure(str(error), kind="not finite" if isinstance(error, NotFiniteError) else "out of range")
    except Exception as error:
        clear_frames(error.__traceback__)  # their local variables hold models and batches
        return Failure(" ".join(f"{type(error).__name__}: {error}".split()), error)
    except _Expired:
        return Failure(f"it took longer than failures.timeout, {seconds:g} s", kind="too slow")


def _call_within(seconds: float, call: Callable[[], Result]) -> Result:
    def expire(signum: int, frame: FrameType | None) -> None:
        raise _Expired

    before = signal.signal(signal.SIGALRM, expire)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, seconds, _RING_AGAIN_AFTER)
            return call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except _Expired:
        signal.setitimer(signal.ITIMER_REAL, 0)  # the alarm may have interrupted the same call above
        raise
    finally:
        signal.signal(signal.SIGALRM, before)


def check_finite(trees: Iterable[Tree], weight: float, known: Mapping[str, Tensor]) -> None:
    """Refuses a client's values that are not finite, except infinite ones that ``known`` has too, such as in a mask."""
    # a finite sum has only finite terms; benchmarks/idle.py measures what this check costs
    total = weight
    new = [(name, tensor) for tree in trees for name, tensor in tree.items() if tensor is not known.get(name)]
    floating = [(name, tensor) for name, tensor in new if tensor.is_floating_point()]
    floating += [(name, torch.view_as_real(tensor)) for name, tensor in new if tensor.is_complex()]
    for _, tensor in floating:
        total += tensor.sum().item()
    if math.isfinite(total):
        return
    if not math.isfinite(weight):
        raise NotFiniteError(f"its weight is {weight}")
    for name, tensor in floating:
        before = known.get(name.rpartition("/")[2])  # an algorithm may keep a copy with a prefix
        wrong = ~tensor.isfinite()
        if before is not None and before.shape == tensor.shape:
            wrong &= tensor != before
        if wrong.any():
            raise NotFiniteError(f"its {name} is not finite")
