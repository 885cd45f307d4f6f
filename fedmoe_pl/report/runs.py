"""What a report reads from a run's folder."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.checks import InvalidArgumentError

Row = Mapping[str, Any]
"""A row of a CSV file: texts, and numbers as floats, nan for an empty field."""

_TEXTS = {"method", "model", "clients", "evaluation_point", "selection", "expert", "name", "lower_is_better"}
_ALLOWED = "the folder of a run (runs/<name>/version_<n>) or of several"
_WORST = "_worst_tenth"
NEW_CLIENTS = "new_clients"


@dataclass(frozen=True, eq=False)
class RunFiles:
    """The rows of a run's files, of which there are none where it has not written the file."""

    folder: Path
    rounds: list[Row]
    clients: list[Row]
    summary: list[Row]
    partition: list[Row]
    gates: list[Row]
    config: dict[str, Any]  # config.yaml
    cell: dict[str, Any]  # cell.yaml, which `fedmoe benchmark` writes into the folder above

    @property
    def name(self) -> str:
        """The name of the experiment and the version, such as ``quickstart/version_0``."""
        return f"{self.folder.parent.name}/{self.folder.name}"

    @property
    def text(self) -> str:
        """The name and the seed."""
        return self.name if self.seed is None else f"{self.name}, seed {self.seed}"

    @property
    def seed(self) -> int | None:
        """The run's seed; None if it has no ``config.yaml``."""
        return self.config.get("seed_everything")

    @property
    def seeds(self) -> tuple[Any, Any]:
        """The run's seed and that of its partition, None where there is none."""
        return self.seed, self.config.get("data", {}).get("init_args", {}).get("partition_seed")

    def of(self, method: str) -> RunFiles:
        """The same run with the rows of one method."""
        tables = {name: getattr(self, name) for name in ("rounds", "clients", "summary", "gates")}
        return replace(self, **{n: [row for row in rows if row["method"] == method] for n, rows in tables.items()})

    @property
    def written(self) -> str:
        """When it wrote its newest result, in local time."""
        paths = [self.folder / name for name in ("rounds.csv", "summary.csv")]
        newest = max(path.stat().st_mtime for path in paths if path.exists())
        return datetime.fromtimestamp(newest).strftime("%Y-%m-%d %H:%M")

    @property
    def methods(self) -> list[str]:
        """The evaluated methods, in the order of the run."""
        return list(dict.fromkeys(row["method"] for row in (*self.summary, *self.rounds)))

    @cached_property
    def metrics(self) -> list[str]:
        """The accuracies and other metrics that some clients have."""
        rows = [*self.rounds, *self.summary]
        names = dict.fromkeys(metric for row in rows[:1] + rows[-1:] for metric in metrics_of(row))
        return [metric for metric in names if any(not math.isnan(row.get(f"{metric}_mean", math.nan)) for row in rows)]

    @property
    def is_finished(self) -> bool:
        """Whether all phases that are evaluated have a result."""
        done = {row["method"] for row in self.summary}
        phases = self.config.get("federation", {}).get("phases", [])
        return bool(done) and done.issuperset(phase["name"] for phase in phases if phase.get("evaluate", True))


def metrics_of(row: Row) -> list[str]:
    """The accuracies and other metrics with columns in a row of ``rounds.csv`` or ``summary.csv``."""
    return [column.removesuffix(_WORST) for column in row if column.endswith(_WORST)]


def find_runs(paths: Iterable[Path]) -> list[RunFiles]:
    """Reads runs, and all runs in folders that hold several, except for those of new clients."""
    runs: dict[Path, RunFiles] = {}
    for path in paths:
        folders = [path] if _is_run(path) else sorted(filter(_is_run, path.rglob("version_*")), key=_natural)
        folders = [folder for folder in folders if folder == path or NEW_CLIENTS not in folder.relative_to(path).parts]
        if not folders:
            raise InvalidArgumentError("report", "RUN", str(path), _ALLOWED)
        found = {folder.resolve(): read_run(folder) for folder in folders}
        if not any(run.methods for run in found.values()):
            raise InvalidArgumentError("report", "RUN", str(path), "that of a run with results", "it has none yet")
        runs |= {folder: run for folder, run in found.items() if run.methods}
    return list(runs.values())


def read_run(folder: Path) -> RunFiles:
    """Reads a run's files; those that are missing give no rows."""
    names = ("rounds", "clients", "summary", "partition", "gate_weights")
    rounds, clients, summary, partition, gates = (read_rows(folder / f"{name}.csv") for name in names)
    if (path := folder / "rounds.csv").is_file():
        _check_rounds(path, rounds, summary)
    config, cell = _mapping(folder / "config.yaml"), _mapping(folder.parent / "cell.yaml")
    return RunFiles(folder, rounds, clients, summary, partition, gates, config, cell)


def _check_rounds(path: Path, rounds: Iterable[Row], summary: Iterable[Row]) -> None:
    """Refuses a ``rounds.csv`` whose end is missing: a run writes the row of a round before any result of it."""
    evaluated = {(row["method"], row["round"]) for row in rounds}
    for row in summary:
        if (row["method"], row["round"]) not in evaluated:
            raise MisconfigurationException(
                f"report: RUN has the file '{path}', which is cut off: it lacks round {row['round']:.0f} of "
                f"'{row['method']}', whose result is in summary.csv."
            )


def _is_run(folder: Path) -> bool:
    """Whether a folder is that of a run, which may have no results yet; that of a grid's cell holds one."""
    return not (folder / "cell.yaml").exists() and any(
        (folder / name).exists() for name in ("rounds.csv", "summary.csv", "config.yaml", "checkpoints")
    )


def _natural(folder: Path) -> list[tuple[str, int]]:
    """A key to sort folders, ``version_10`` after ``version_9``."""
    parts = ((part, *part.rpartition("_")) for part in folder.parts)
    return [(head, int(number)) if number.isdigit() else (part, -1) for part, head, _, number in parts]


def _mapping(path: Path) -> dict[str, Any]:
    return (yaml.safe_load(path.read_text(encoding="utf-8")) or {}) if path.is_file() else {}


def read_rows(path: Path) -> list[Row]:
    """The rows of a run's file, of which there are none if it is missing."""
    if not path.is_file():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as file:
            lines = file.readlines()
        reader = csv.DictReader(lines)
        if not lines or not lines[-1].endswith("\n"):
            raise ValueError("its last line has no end")
        rows: list[Row] = [{column: _value(column, text) for column, text in row.items()} for row in reader]
    except ValueError as error:
        raise MisconfigurationException(f"report: RUN has the file '{path}', which is damaged: {error}.") from error
    return rows


def _value(column: str, text: str | None) -> str | float:
    if column in _TEXTS:
        return text or ""
    return float(text) if text else math.nan
