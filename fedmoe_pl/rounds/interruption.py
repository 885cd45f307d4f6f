"""Ends a run within seconds of a signal, such as Ctrl-C, wherever it is, and requeues it on SLURM's signal."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.utilities import rank_zero_warn

from fedmoe_pl.checkpoints.checkpoint import FILE
from fedmoe_pl.rounds.run import Run

_END = b"\0"  # no signal has this number: the run has ended
_SECONDS_TO_END = 10.0  # time after a signal before a thread ends the process, because the main thread hangs


class Interruption(BaseException):
    """A signal has arrived; not a ``KeyboardInterrupt``, because Lightning would catch it and then ignore Ctrl-C.

    Attributes:
        signum: the signal's number.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


@contextmanager
def interruptible(run: Run, runs: Path, command: str | None) -> Iterator[None]:
    """In this context, a signal ends the run within seconds, even during training, and prints how to continue.

    The signals are Ctrl-C, SIGTERM, SIGHUP (a closed terminal), and SIGUSR1, after which a SLURM job is requeued. A
    second signal ends the process at once. If the main thread is in an operation that Python cannot interrupt, another
    thread ends the process ten seconds after the first signal. Signals that are ignored or that the user handles stay
    as they are. Outside the main thread, where Python has no signals, this does nothing; on Windows, only Ctrl-C works.
    """
    try:
        with _handled():
            if command is not None:
                with suppress(OSError):  # the run is about to begin; usually there is no note
                    _note(runs, command).unlink()
            yield
    except (KeyboardInterrupt, Interruption) as end:
        signum = end.signum if isinstance(end, Interruption) else signal.SIGINT
        checkpoint = run.folder / FILE
        if command is not None:
            with suppress(OSError):  # the terminal may be closed
                print(how_to_continue(signum, checkpoint, command), file=sys.stderr, flush=True)
            if signum == getattr(signal, "SIGUSR1", None) and SLURMEnvironment.detect():
                requeue(runs, command, checkpoint)
        raise (KeyboardInterrupt() if signum == signal.SIGINT else SystemExit(128 + signum)) from None


@contextmanager
def _handled() -> Iterator[None]:
    """In this context, a signal raises :class:`Interruption` in the main thread, and a thread runs ``_watch``."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGHUP"):
        yield
        return
    with raising(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1) as handled:
        read, write = os.pipe()
        os.set_blocking(write, False)
        woken = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        watch = threading.Thread(target=_watch, args=(read, handled), daemon=True)
        watch.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(woken)
            os.write(write, _END)  # closing is not enough: forked processes that read samples hold the pipe open, too
            watch.join()
            os.close(write)
            os.close(read)


@contextmanager
def raising(*signals: signal.Signals) -> Iterator[list[signal.Signals]]:
    """In this context, a signal that is neither ignored nor handled by the user raises :class:`Interruption`."""
    usual = (signal.SIG_DFL, signal.default_int_handler)
    before = {signum: handler for signum in signals if (handler := signal.getsignal(signum)) in usual}
    try:
        for signum in before:
            signal.signal(signum, _raise)
        yield [*before]
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _raise(signum: int, frame: FrameType | None) -> None:
    raise Interruption(signum)


def _watch(read: int, signals: Sequence[int]) -> None:
    """Ends the process at a second signal, or some seconds after the first."""
    first: int | None = None
    while True:
        in_time = select.select([read], [], [], None if first is None else _SECONDS_TO_END)[0]
        arrived = os.read(read, 100) if in_time else b""
        if _END in arrived:
            return
        ending = [signum for signum in arrived if signum in signals]
        if first is not None and (ending or not in_time):
            os._exit(128 + first)
        first = ending[0] if ending else first


def how_to_continue(signum: int, checkpoint: Path, command: str) -> str:
    """The message that a run has ended and how to continue it after its last complete round."""
    ended = f"fedmoe: {signal.Signals(signum).name} has ended the run"
    if not checkpoint.is_file():
        return f"{ended}, which has no checkpoint to continue from."
    how = f"{command} --ckpt_path {checkpoint}" if command else f"fit(model, datamodule, ckpt_path='{checkpoint}')"
    return f"{ended}; it continues from its last checkpoint with\n{how}"


def requeue(runs: Path, command: str, checkpoint: Path) -> None:
    """Requeues the SLURM job, as Lightning does, and notes the checkpoint that the job continues from."""
    job, note = _job(), _note(runs, command)
    if checkpoint.is_file():
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(str(checkpoint))
    try:
        result = subprocess.run(["scontrol", "requeue", job], check=False).returncode
    except OSError as error:  # a container may lack it
        result = error.strerror
    if result:
        rank_zero_warn(f"The SLURM job {job} could not be requeued: scontrol gave {result}.")


def requeued(runs: Path, command: str) -> str | None:
    """The checkpoint from which a requeued SLURM job's command continues, until it has begun; None if there is none."""
    if not (SLURMEnvironment.detect() and int(os.environ.get("SLURM_RESTART_COUNT", 0))):
        return None
    note = _note(runs, command)
    return note.read_text() if note.is_file() else None


def _job() -> str:
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        return f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    return os.environ.get("SLURM_JOB_ID", "")


def _note(runs: Path, command: str) -> Path:
    # a job may run several commands, of which each goes on from its own checkpoint
    return runs / f"requeued_{_job()}_{zlib.crc32(command.encode()):08x}"
