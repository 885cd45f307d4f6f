"""What a report reads from a run's folder."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.checkpoints.configuration import RECORD
from fedmoe_pl.checks import InvalidArgumentError, reason_of
from fedmoe_pl.evaluation.results import ACCURACIES

Row = Mapping[str, Any]
"""A row of a CSV file: texts, and numbers as floats, nan for an empty field."""

# Anyone may have made the folder of a run: its files are read with these bounds.
_MOST_BYTES, _DEEPEST, _MOST_DIGITS = 2**28, 50, 9
_NO = type(None)
_PHASE = {"name": str, "algorithm": (_NO, {"class_path": str}), "start": (_NO, str, {...: str})}
_CONFIG = {
    "seed_everything": (_NO, int),
    "data": (_NO, {"partition_seed": (_NO, int), "init_args": (_NO, {"partition_seed": (_NO, int)})}),
    "federation": (_NO, {"phases": (_NO, [_PHASE])}),
}
_NUMBERS = (_NO, [(int, float), (_NO, int, float)])
_CELL = {
    **{"values": (_NO, {}), "baseline": (_NO, str)},
    "paper": (_NO, [{"metric": str, "table": str, "cells": {...: _NUMBERS}}]),
}
_EVALUATED = ("method", "round", "evaluation_point")
_COLUMNS = {
    "rounds": _EVALUATED,
    "clients": ("method", "client"),
    "summary": _EVALUATED,
    "partition": ("client", "train", "validation", "test"),
    "gate_weights": ("method", "client", "expert"),
}
_COUNTED = {"round", "client"}
_TEXTS = {"method", "model", "clients", "evaluation_point", "selection", "expert", "name", "lower_is_better"}
_ALLOWED = "the folder of a run (runs/<name>/version_<n>) or of several"
_WORST = "_worst_tenth"
_OTHER_METRICS = ("local_test_", "global_test_", "validation_")  # what their names begin with
NEW_CLIENTS = "new_clients"
CELL = "cell.json"


@dataclass(frozen=True, eq=False)
class RunFiles:
    """The rows of a run's files, of which there are none where it has not written the file."""

    folder: Path
    rounds: list[Row]
    clients: list[Row]
    summary: list[Row]
    partition: list[Row]
    gates: list[Row]
    config: dict[str, Any]  # record.json
    cell: dict[str, Any]  # cell.json, which `fedmoe benchmark` writes into the folder above

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
        """The run's seed; None if it has no file with its configuration."""
        return self.config.get("seed_everything")

    @property
    def seeds(self) -> tuple[Any, Any]:
        """The run's seed and that of its partition, None where there is none."""
        data = self.config.get("data") or {}
        return self.seed, (data.get("init_args") or data).get("partition_seed")

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
        phases = phases_of(self.config)
        return bool(done) and done.issuperset(phase["name"] for phase in phases if phase.get("evaluate", True))


def phases_of(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The phases of a configuration."""
    return (config.get("federation") or {}).get("phases") or []


def metrics_of(row: Row) -> list[str]:
    """The accuracies and other metrics with columns in a row of ``rounds.csv`` or ``summary.csv``."""
    names = [column.removesuffix(_WORST) for column in row if column.endswith(_WORST)]
    return [name for name in names if name in ACCURACIES or name.startswith(_OTHER_METRICS)]


def find_runs(paths: Iterable[Path]) -> list[RunFiles]:
    """Reads runs, and all runs in folders that hold several, except for those of new clients."""
    runs: dict[Path, RunFiles] = {}
    for path in paths:
        folders = [path] if _is_run(path) else sorted(filter(_is_run, path.rglob("version_*")), key=_natural)
        folders = [folder for folder in folders if folder == path or NEW_CLIENTS not in folder.relative_to(path).parts]
        if not folders:
            because = "no run is in it" if path.is_dir() else "there is no such folder"
            raise InvalidArgumentError("report", "RUN", str(path), _ALLOWED, because)
        found = {folder.resolve(): read_run(folder) for folder in folders}
        if not any(run.methods for run in found.values()):
            raise InvalidArgumentError("report", "RUN", str(path), "that of a run with results", "it has none yet")
        if not any(run.metrics for run in found.values()):
            because = "no client reports any, as federation.reports.metrics says"
            raise InvalidArgumentError("report", "RUN", str(path), "that of a run with accuracies", because)
        runs |= {folder: run for folder, run in found.items() if run.metrics}
    return list(runs.values())


def read_run(folder: Path) -> RunFiles:
    """Reads a run's files; those that are missing give no rows."""
    rounds, clients, summary, partition, gates = (
        read_rows(folder / f"{name}.csv", columns) for name, columns in _COLUMNS.items()
    )
    if (path := folder / "rounds.csv").is_file():
        _check_rounds(path, rounds, summary)
    config, cell = _read_tree(folder / RECORD, _CONFIG), _read_tree(folder.parent / CELL, _CELL)
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
    return not (folder / CELL).exists() and any(
        (folder / name).exists() for name in ("rounds.csv", "summary.csv", RECORD, "checkpoints")
    )


def _natural(folder: Path) -> list[tuple[str, int]]:
    """A key to sort folders, ``version_10`` after ``version_9``."""
    parts = ((part, *part.rpartition("_")) for part in folder.parts)
    return [(head, int(number)) if number.isdigit() else (part, -1) for part, head, _, number in parts]


def read_rows(path: Path, needed: Collection[str] = ()) -> list[Row]:
    """The rows of a run's file, of which there are none if it is missing."""
    with reading(path):
        return [{name: _value(name, text) for name, text in row.items()} for row in read_texts(path, needed)]


def read_texts(path: Path, needed: Collection[str] = ()) -> list[dict[str, str]]:
    """The rows of a CSV file as texts; ``needed`` are columns that it must have; to be called in :func:`reading`."""
    text = _read(path)
    if text is None:
        return []
    if not text.endswith("\n"):
        raise ValueError("its last line has no end")
    columns, *lines = filter(None, csv.reader(io.StringIO(text, newline="")))
    if len({*columns}) < len(columns) or not {*columns}.issuperset(needed) or not all(map(str.isprintable, columns)):
        raise ValueError("its first line has not the names of its columns")
    return [dict(zip(columns, line, strict=True)) for line in lines]


def _read_tree(path: Path, shape: Any) -> dict[str, Any]:
    """The mapping in a file of JSON, which has a shape (:func:`_fits`); empty if the file is missing."""
    with reading(path):
        tree = json.loads(_read(path) or "{}")
        _check_values(tree)
        if not _fits(tree, shape):
            raise ValueError("it is not what a run writes")
        return tree


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """In this context, a file is read: what is wrong with it ends in a sentence."""
    try:
        yield
    except (OSError, ValueError, RecursionError, csv.Error) as error:
        raise MisconfigurationException(
            f"report: RUN has the file '{path}', which is damaged: {reason_of(error)}."
        ) from error


def _read(path: Path) -> str | None:
    if not path.is_file():
        return None
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"it has more than {_MOST_BYTES:,} bytes")
    with path.open(newline="", encoding="utf-8") as file:
        return file.read()


def _check_values(value: Any, depth: int = 0) -> None:
    """Refuses a tree that is deep, or has halves of a character."""
    if depth > _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} levels deep")
    if isinstance(value, str):
        value.encode()
    for child in [*value, *value.values()] if isinstance(value, dict) else value if isinstance(value, list) else ():
        _check_values(child, depth + 1)


def _fits(value: Any, shape: Any) -> bool:
    """Whether a value has a shape: one of several, a mapping with these keys (or any, ``...``), a list, or a class."""
    if isinstance(shape, tuple):
        return any(_fits(value, each) for each in shape)
    if isinstance(shape, dict):
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            return False
        return all(_fits(of_key, shape.get(key, shape.get(..., object))) for key, of_key in value.items()) and all(
            key in value or _fits(None, of_key) for key, of_key in shape.items() if key is not ...
        )
    if isinstance(shape, list):
        shapes: Sequence[Any] = shape * len(value) if len(shape) == 1 and isinstance(value, list) else shape
        return isinstance(value, list) and len(value) == len(shapes) and all(map(_fits, value, shapes))
    return isinstance(value, shape)


def _value(column: str, text: str) -> str | float:
    if column in _TEXTS:
        return text
    if column in _COUNTED and not (text.isdecimal() and len(text) <= _MOST_DIGITS):
        raise ValueError(f"a {column} is '{text[:_MOST_DIGITS]}'")
    return float(text) if text else math.nan
