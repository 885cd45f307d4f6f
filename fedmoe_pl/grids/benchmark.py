"""The command ``fedmoe benchmark`` and its table."""

from __future__ import annotations

import math
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

from fedmoe_pl.checkpoints.files import exclusive
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.grids.cells import Cell, Configured, finished_run, is_row_of, make_cells
from fedmoe_pl.grids.grid import PARTITION_SEED, SEED, Grid, value_name
from fedmoe_pl.grids.processes import run_cells
from fedmoe_pl.logs.summary import write_csv
from fedmoe_pl.report.latex import latex
from fedmoe_pl.report.markdown import markdown
from fedmoe_pl.report.runs import read_run
from fedmoe_pl.report.settings import conditions, left_out_notes, settings_of
from fedmoe_pl.report.tables import Choices, Condition, PaperNumber, condition_of, difference
from fedmoe_pl.rounds.interruption import Interruption


def write_tables(grid: Grid, runs: Sequence[tuple[Cell, Path]]) -> str:
    """Writes ``table.csv``, ``table.md`` and ``table.tex`` of finished cells, and returns the table as Markdown."""
    phases = dict.fromkeys(phase for cell, _ in runs for phase in cell.phases)
    settings, left_out = settings_of(read_run(folder) for _, folder in runs)
    choices, folder = Choices(baseline=grid.baseline), Path(grid.folder)
    found = [condition_of(name, group, choices) for name, group in conditions(settings).items()]
    shown = [[method for method in each.methods if any(is_row_of(method.name, p) for p in phases)] for each in found]
    found = [replace(each, methods=methods) for each, methods in zip(found, shown, strict=True)]
    text = "\n\n".join([markdown(found), *left_out_notes(left_out)])
    write_csv(folder / "table.csv", [row for each in found for row in _csv_rows(each)])
    (folder / "table.md").write_text(f"{text}\n", encoding="utf-8")
    (folder / "table.tex").write_text("\n".join(map(latex, found)), encoding="utf-8")
    return text


def _csv_rows(condition: Condition) -> Iterator[dict[str, object]]:
    """Yields a row for each method and metric; accuracies are fractions."""
    baseline = condition.baseline
    for method in condition.methods:
        cell, row = method.runs[0].cell, method.results[0]
        where = {"variant": cell["variant"]} if cell["variant"] else {}
        where |= {key: value_name(value) for key, value in cell["values"].items() if key not in (SEED, PARTITION_SEED)}
        for metric in condition.metrics:
            spread = method.over_seeds(f"{metric}_mean")
            paper = (method.published(metric) or [PaperNumber("", math.nan, None)])[0]
            to = None if baseline is None or method is baseline else difference(method, baseline, metric)
            if math.isnan(spread.mean):
                continue
            yield {
                **where,
                "method": method.label,
                **{column: row[column] for column in ("model", "evaluation_point", "selection")},
                "metric": metric,
                "seeds": " ".join(str(run.seed) for run in method.runs),
                "partition_seeds": " ".join(str(run.seeds[1]) for run in method.runs),
                "mean": spread.mean,
                "std": spread.std,
                "paper": paper.mean / 100,
                "paper_std": math.nan if paper.std is None else paper.std / 100,
                "baseline": condition.choices.baseline or "",
                "difference": to.mean if to else math.nan,
                "p": to.p_value if to else math.nan,
                "pairs": to.pairs if to else "",
                "more_than_noise": to.is_more_than_noise if to else "",
            }


def benchmark(grid: Grid, configured: Configured, arguments: Sequence[str]) -> int:
    """Runs a grid that arguments gave, prints and writes its table, and returns the exit code.

    It is 1 if a cell failed, and 128 + n for signal n.
    """
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


def locked(folder: Path, command: str) -> AbstractContextManager[None]:
    """Keeps other processes from running cells in the same folder."""
    taken = f"folder is '{folder}', but another process runs a grid there now; wait until it ends, or end it."

    def unusable(error: OSError) -> InvalidArgumentError:
        allowed = f"a folder in which files can be written ({error.strerror})"
        return InvalidArgumentError(command, "folder", str(folder), allowed)

    return exclusive(folder / "lock", taken, unusable)
