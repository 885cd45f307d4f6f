"""The trials of a search, in a report of its folder: a table of all, beside the tables of the best one's run."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from fedmoe_pl.callbacks.hparams import short_names
from fedmoe_pl.checks import is_file_name
from fedmoe_pl.logs.summary import value_text
from fedmoe_pl.report.runs import read_texts, reading
from fedmoe_pl.report.tables import Table

TRIALS = "trials.csv"
"""The file of all trials: their names, states, whether it is the best, last rounds, metric, and values of each key."""
_FIRST = ("trial", "state", "best", "round")  # the columns before the metric


class SearchTable(NamedTuple):
    """The table of a search: its trials, and which one is best."""

    title: str
    table: Table
    best: str  # its row's name

    @property
    def text(self) -> str:
        """What the tables below are of."""
        return f"Ordered as they were run. All that follows is of the best one, {self.best}." if self.best else ""


def divided(folders: Iterable[Path]) -> tuple[list[SearchTable], list[Path]]:
    """The trials of those folders that have some, and the folders, of which the best trial's takes the place."""
    found, runs = [], []
    for folder in folders:
        if (folder / TRIALS).is_file():
            found.append(_trials(folder))
            folder = folder / found[-1].best
        runs.append(folder)
    return found, runs


def _trials(folder: Path) -> SearchTable:
    with reading(folder / TRIALS):
        rows = read_texts(folder / TRIALS, _FIRST)
        if not rows or len(rows[0]) == len(_FIRST):
            raise ValueError("it has no trials of a metric")
        metric, *keys = [*rows[0]][len(_FIRST) :]
        names = short_names(tuple(key.split(".")) for key in keys).values()
        best = next((row["trial"] for row in rows if row["best"]), "")
        if best and not is_file_name(best):
            raise ValueError("the best trial has no name of a folder")
        cells = [
            [
                *(row["trial"], row["state"], row["round"] or "-"),
                value_text(metric, float(row[metric] or math.nan)),
                *(brief_number(row[key]) for key in keys),
            ]
            for row in rows
        ]
    header = ["trial", "state", "round", metric.replace("_", " "), *names]
    return SearchTable(f"{len(rows)} trials of {folder.name.removesuffix('_tune')}", Table(header, cells), best)


def brief_number(value: Any) -> str:
    """A number with four digits; other values as they are.

    Example:
        >>> brief_number("0.0123456"), brief_number(20), brief_number("12345"), brief_number("LinearGate")
        ('0.01235', '20', '12345', 'LinearGate')
    """
    try:
        return str(value) if str(value).isdigit() else f"{float(value):.4g}"
    except (TypeError, ValueError):
        return str(value)
