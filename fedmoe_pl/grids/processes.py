"""Runs cells, each as ``fedmoe fit`` in a process of its own, one after another or several at a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import yaml
from filelock import Timeout

from fedmoe_pl.backends.fitting import cores_of_process
from fedmoe_pl.checkpoints.checkpoint import LOCK
from fedmoe_pl.checkpoints.files import acquired
from fedmoe_pl.grids.cells import Cell, cut_run, finished_run, last_round
from fedmoe_pl.grids.forks import ForkedProcess, fork
from fedmoe_pl.grids.grid import VARIANT, Grid, published_for
from fedmoe_pl.report.runs import CELL
from fedmoe_pl.rounds.interruption import Interruption, raising

_POLL = 0.1  # seconds between two looks at the processes
_TELL = 30.0  # seconds after which a line says how far a run is
_SECONDS_TO_END = 15.0  # after a signal; a run needs at most ten
_LONGEST = 300  # characters of an error in a line
_PROGRAM = [sys.executable, "-m", "fedmoe_pl"]


@dataclass
class _Process:
    title: str
    cell: Cell
    slot: int
    process: ForkedProcess | subprocess.Popen[bytes]
    began: float
    is_ended: bool = False  # by this process
    started: float = field(default_factory=time.time)
    told: float = 0.0  # when a line said how far it is
    reached: str = ""  # what that line said


def run_cells(
    cells: Iterable[tuple[str, Cell]],
    grid: Grid,
    is_pruned: Callable[[Cell], bool] = lambda cell: False,
    on_end: Callable[[Cell, bool], None] = lambda cell, has_succeeded: None,
) -> list[Cell]:
    """Runs the cells that are not finished, under their titles; a line says when each of them begins and ends.

    Another line says from time to time which round it has evaluated. A cell is taken when a process is free for it, and
    its run is ended as soon as it ``is_pruned``. Returns those that failed.
    """
    waiting, running, failed = iter(cells), list[_Process](), list[Cell]()
    with raising(signal.SIGINT, signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])):
        try:
            while True:
                free = [slot for slot in range(grid.parallel) if slot not in [each.slot for each in running]]
                for slot, (title, cell) in zip(free, _unfinished(waiting, grid, on_end), strict=False):
                    running.append(_start(title, cell, slot, grid.parallel))
                if not running:
                    return failed
                time.sleep(_POLL)
                for each in [*running]:
                    if each.process.poll() is not None:
                        running.remove(each)
                        has_succeeded = _has_succeeded(each)
                        on_end(each.cell, has_succeeded)
                        failed += [] if has_succeeded or each.is_ended else [each.cell]
                    elif each.is_ended:
                        continue
                    elif is_pruned(each.cell):
                        each.process.terminate()
                        each.is_ended = True
                    else:
                        _say_progress(each)
        except Interruption:
            _end(running)
            raise


def _unfinished(
    cells: Iterator[tuple[str, Cell]], grid: Grid, on_end: Callable[[Cell, bool], None]
) -> Iterator[tuple[str, Cell]]:
    """Yields the cells that must be run."""
    for title, cell in cells:
        _write(cell.folder / CELL, json.dumps(_document(grid, cell), indent=1, default=str))
        _await_other(title, cell)
        if (run := finished_run(cell)) is None:
            yield title, cell
        else:
            print(f"{title} is finished: {run}", flush=True)
            on_end(cell, True)


def _await_other(title: str, cell: Cell) -> None:
    """Waits for a run that has outlived the process that started it, which was killed."""
    if (checkpoint := cut_run(cell)) is None:
        return
    path = checkpoint.with_name(LOCK)
    try:
        lock = acquired(path)
    except Timeout:
        print(f"{title} is still run by a process of an earlier command, which is waited for", flush=True)
        lock = acquired(path, timeout=-1)
    lock.release()


def _document(grid: Grid, cell: Cell) -> dict[str, Any]:
    """What ``cell.json`` says of a cell, for its report."""
    return {
        "variant": cell.where.get(VARIANT),
        "values": {key: value for key, value in cell.where.items() if key != VARIANT},
        "baseline": grid.baseline,
        "paper": [
            {
                "table": published.table,
                "metric": published.metric,
                "cells": {method: [*number] for method, number in published.numbers.items()},
            }
            for published in published_for(grid.paper, cell.condition)
        ],
    }


def _start(title: str, cell: Cell, slot: int, parallel: int) -> _Process:
    """Starts or continues the run of a cell."""
    path = cell.folder / "config.yaml"
    _write(path, yaml.safe_dump(cell.configuration, sort_keys=False))
    checkpoint, device = cut_run(cell), _gpu(cell, slot) if parallel > 1 else None  # one run at a time has them all
    environment = {} if device is None else {"CUDA_VISIBLE_DEVICES": device}
    cores = cores_of_process()
    # or runs would start more worker processes than there are cores
    cores = cores[slot::parallel] if device is None and 1 < parallel <= len(cores) else []
    command = _command(path, checkpoint)
    process = fork(command, cell.folder, environment, cores) or _popen(command, cell.folder, environment, cores)
    where = f" on GPU {device}" if device is not None else ""
    print(f"{title} starts{where}" if checkpoint is None else f"{title} goes on{where} from {checkpoint}", flush=True)
    return _Process(title, cell, slot, process, time.monotonic())


def _popen(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], cores: Sequence[int]
) -> subprocess.Popen[bytes]:
    """Runs a command in a new process where none can be forked, with the arguments of :func:`fork`."""
    with (folder / "stdout.log").open("ab") as out, (folder / "stderr.log").open("wb") as errors:
        # in a session of its own, so that Ctrl-C reaches only this process, which ends the others
        process = subprocess.Popen(
            [*_PROGRAM, *command],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(process.pid, cores)
    return process


def _command(configuration: Path, checkpoint: Path | None) -> list[str]:
    """The command that runs a configuration, or continues its run."""
    command = ["fit", "--config", str(configuration)]
    return command if checkpoint is None else [*command, "--ckpt_path", str(checkpoint)]


def _gpu(cell: Cell, slot: int) -> str | None:
    """The GPU of a run, as in ``CUDA_VISIBLE_DEVICES``; None if it trains on the CPU."""
    if cell.configuration["trainer"]["accelerator"] not in ("auto", "gpu", "cuda") or not torch.cuda.device_count():
        return None
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(torch.cuda.device_count())]
    return names[slot % len(names)]


def _say_progress(each: _Process) -> None:
    """Says which round a run has evaluated last, after some time and if it is another one."""
    now = time.monotonic()
    if now - max(each.began, each.told) < _TELL:
        return
    each.told, reached = now, last_round(each.cell, each.started)
    if reached and reached != each.reached:
        each.reached = reached
        print(f"{each.title} is at {reached}", flush=True)


def _has_succeeded(each: _Process) -> bool:
    """Says how a run has ended, and returns whether it is finished."""
    code = each.process.wait()
    duration = timedelta(seconds=round(time.monotonic() - each.began))
    if code == 0 or each.is_ended:
        print(f"{each.title} is {'pruned' if each.is_ended else 'finished'} after {duration}", flush=True)
        return code == 0
    path = each.cell.folder / "stderr.log"
    lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
    reason = f"the process was ended by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    last = lines[-1][:_LONGEST] if lines else "nothing on stderr"
    print(f"{each.title} failed after {duration} ({reason}): {last} [{path}]", flush=True)
    return False


def _end(running: Sequence[_Process]) -> None:
    """Ends all runs; each keeps its last whole round."""
    deadline = time.monotonic() + _SECONDS_TO_END
    for each in running:
        if each.process.poll() is None:
            each.process.terminate()
    while time.monotonic() < deadline and any(each.process.poll() is None for each in running):
        time.sleep(_POLL)
    for each in running:
        if each.process.poll() is None:
            os.killpg(each.process.pid, signal.SIGKILL)
            each.process.wait()


def _write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
