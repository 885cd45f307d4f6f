"""The command ``fedmoe benchmark``."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.benchmark.cells import Cell, Configured, make_cells
from fedmoe_pl.benchmark.files import write_tables
from fedmoe_pl.benchmark.grid import Grid, read_grid
from fedmoe_pl.benchmark.processes import run_cells
from fedmoe_pl.benchmark.published import VARIANT, published_for
from fedmoe_pl.benchmark.results import make_rows
from fedmoe_pl.benchmark.state import finished_run, has_begun
from fedmoe_pl.benchmark.table import format_grid
from fedmoe_pl.checkpoints.lock import exclusive
from fedmoe_pl.rounds.interruption import Interruption


def benchmark(arguments: Sequence[str], configured: Configured) -> int:
    """Runs a grid, and prints and writes its table.

    Args:
        arguments: the arguments of the command.
        configured: makes the federation of the arguments of ``fedmoe fit``; see ``fedmoe_pl.cli.cli.configured``.

    Returns:
        The exit code: 0, 1 if a cell failed, or 128 and the number of the signal that ended the runs.

    Raises:
        ArgumentError: if an argument is unknown or has a wrong type, or a file is missing.
        MisconfigurationException: if the grid, or the configuration of a cell, is wrong; nothing has been run then.
    """
    grid = read_grid(arguments)
    print(f"checking the configurations of {_number(grid)} runs", flush=True)
    cells = make_cells(grid, configured, has_begun)
    folder = Path(grid.folder)
    with _locked(folder):
        try:
            failed = run_cells(cells, grid.parallel, [_document(grid, cell) for cell in cells])
        except Interruption as end:
            command = shlex.join(["fedmoe", "benchmark", *arguments])
            name = signal.Signals(end.signum).name
            print(f"fedmoe: {name} has ended the runs; they continue with\n{command}", file=sys.stderr, flush=True)
            return 128 + end.signum
    _show(grid, cells)
    for cell in failed:
        print(f"fedmoe: {cell.name} failed; see {cell.folder / 'stderr.log'}", file=sys.stderr)
    return 1 if failed else 0


def _show(grid: Grid, cells: Sequence[Cell]) -> None:
    """Prints and writes the table of the finished cells."""
    runs = [(cell, run) for cell in cells if (run := finished_run(cell)) is not None]
    rows = make_rows(runs, grid.baseline, grid.paper)
    if rows:
        table = rows, grid.words, grid.baseline, grid.paper
        files = write_tables(Path(grid.folder), *table)
        print(f"\n{format_grid(*table)}\n\nFiles: {', '.join(map(str, files))}", flush=True)


def _number(grid: Grid) -> int:
    number = max(len(grid.variants), 1)
    for values in grid.values.values():
        number *= len(values)
    return number


def _document(grid: Grid, cell: Cell) -> dict[str, Any]:
    """What ``cell.yaml`` says of a cell; see ``published.py``."""
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


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Keeps other processes from running a grid in the same folder."""
    taken = f"folder is '{folder}', but another process runs a grid there now; wait until it ends, or end it."

    def unusable(error: OSError) -> MisconfigurationException:
        return MisconfigurationException(
            f"folder is '{folder}', but must be a folder in which files can be written ({error.strerror})."
        )

    with exclusive(folder / "lock", taken, unusable):
        yield
