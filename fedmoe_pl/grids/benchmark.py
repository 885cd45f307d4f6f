"""The command ``fedmoe benchmark``."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.checkpoints.files import exclusive
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.grids.cells import Configured, finished_run, make_cells
from fedmoe_pl.grids.grid import read_grid
from fedmoe_pl.grids.processes import run_cells
from fedmoe_pl.grids.table import write_tables
from fedmoe_pl.rounds.interruption import Interruption


def benchmark(arguments: Sequence[str], configured: Configured) -> int:
    """Runs a grid, prints and writes its table, and returns the exit code: 1 if a cell failed, 128 + n for signal n."""
    grid = read_grid(arguments)
    print(f"checking the configurations of {grid.number} runs", flush=True)
    cells = make_cells(grid, configured)
    with locked(Path(grid.folder), "benchmark"):
        try:
            failed = run_cells(((f"[{n}/{len(cells)}] {cell.name}", cell) for n, cell in enumerate(cells, 1)), grid)
        except Interruption as end:
            return say_how_to_continue(end, ["benchmark", *arguments])
    runs = [(cell, run) for cell in cells if (run := finished_run(cell)) is not None]
    if runs:
        print(f"\n{write_tables(grid, runs)}\n\nFiles: {Path(grid.folder) / 'table'}.csv, .md, .tex", flush=True)
    for cell in failed:
        print(f"fedmoe: {cell.name} failed; see {cell.folder / 'stderr.log'}", file=sys.stderr)
    return 1 if failed else 0


def say_how_to_continue(end: Interruption, arguments: Sequence[str]) -> int:
    """Prints the command that continues the runs, and returns the exit code."""
    name, command = signal.Signals(end.signum).name, shlex.join(["fedmoe", *arguments])
    print(f"fedmoe: {name} has ended the runs; they continue with\n{command}", file=sys.stderr, flush=True)
    return 128 + end.signum


@contextmanager
def locked(folder: Path, command: str) -> Iterator[None]:
    """Keeps other processes from running cells in the same folder."""
    taken = f"folder is '{folder}', but another process runs a grid there now; wait until it ends, or end it."

    def unusable(error: OSError) -> MisconfigurationException:
        allowed = f"a folder in which files can be written ({error.strerror})"
        return InvalidArgumentError(command, "folder", str(folder), allowed)

    with exclusive(folder / "lock", taken, unusable):
        yield
