"""The rows of a grid's table: each method in each condition, over its seeds, beside the paper and the baseline."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmoe_pl.benchmark.cells import Cell, is_row_of
from fedmoe_pl.benchmark.published import Published, PublishedNumber, published_for
from fedmoe_pl.logs.summary import on_test_samples
from fedmoe_pl.report.runs import read_run
from fedmoe_pl.report.statistics import Difference, Spread, over_seeds, paired_difference


@dataclass(frozen=True)
class Number:
    """One method's accuracy in one condition, as fractions, or another metric.

    Attributes:
        spread: its mean over the clients: mean and standard deviation over seeds.
        paper: the published number in percent, and its standard deviation or None; None if there is none.
        difference: the difference to the baseline; None for the baseline itself, or without one.
    """

    spread: Spread
    paper: PublishedNumber | None
    difference: Difference | None


@dataclass(frozen=True)
class Row:
    """One method in one condition.

    Attributes:
        condition: the values of the grid's keys, and the variant, without the seed.
        method: the method.
        evaluated: what was evaluated: the columns ``model``, ``moment`` and ``selection`` of ``clients.csv``.
        seeds: the seeds in which it was run.
        numbers: its accuracies and other metrics.
    """

    condition: dict[str, Any]
    method: str
    evaluated: tuple[str, str, str]
    seeds: list[int]
    numbers: dict[str, Number]


@dataclass(frozen=True)
class _Result:
    """A method's accuracies and other metrics in one run: for each, that of each client, by its id."""

    evaluated: tuple[str, str, str]
    accuracies: dict[str, dict[int, float]]


def make_rows(runs: Sequence[tuple[Cell, Path]], baseline: str | None, paper: Sequence[Published]) -> list[Row]:
    """The rows of the table, in the order of the cells and of the methods in their runs.

    Args:
        runs: the finished cells, each with the folder of its run.
        baseline: the method with which the others are compared, or None.
        paper: the published numbers.
    """
    by_condition: dict[str, list[tuple[Cell, dict[str, _Result]]]] = {}
    for cell, folder in runs:
        by_condition.setdefault(repr(cell.condition), []).append((cell, _results(cell, folder)))
    return [row for cells in by_condition.values() for row in _rows(cells, baseline, paper)]


def _results(cell: Cell, folder: Path) -> dict[str, _Result]:
    """The results of a run's methods, by name."""
    results: dict[str, _Result] = {}
    for row in read_run(folder).clients:
        if any(is_row_of(row["method"], phase) for phase in cell.phases):
            evaluated = (row["model"], row["moment"], row["selection"])
            metrics = on_test_samples(row)
            result = results.setdefault(row["method"], _Result(evaluated, {metric: {} for metric in metrics}))
            for metric in metrics:
                result.accuracies[metric][int(row["client"])] = row[metric]
    return results


def _rows(
    cells: Sequence[tuple[Cell, Mapping[str, _Result]]], baseline: str | None, paper: Sequence[Published]
) -> Iterator[Row]:
    """Yields the rows of one condition, whose cells are its seeds."""
    condition = cells[0][0].condition
    methods = dict.fromkeys(method for _, results in cells for method in results)
    published: dict[tuple[str, str], PublishedNumber] = {
        (each.metric, method): number
        for each in published_for(paper, condition)
        for method, number in each.numbers.items()
    }
    for method in methods:
        runs = [(cell.seed, results) for cell, results in cells if method in results]
        numbers = {}
        for metric in dict.fromkeys(name for _, results in runs for name in results[method].accuracies):
            ours = [results[method].accuracies.get(metric, {}) for _, results in runs]
            if any(not math.isnan(value) for clients in ours for value in clients.values()):
                given = published.get((metric, method))
                numbers[metric] = Number(_spread(ours), given, _difference(runs, method, baseline, metric))
        yield Row(condition, method, runs[0][1][method].evaluated, [seed for seed, _ in runs], numbers)


def _spread(seeds: Sequence[Mapping[int, float]]) -> Spread:
    means = []
    for clients in seeds:
        values = [value for value in clients.values() if not math.isnan(value)]
        means.append(sum(values) / len(values) if values else math.nan)
    return over_seeds(means)


def _difference(
    runs: Sequence[tuple[int, Mapping[str, _Result]]], method: str, baseline: str | None, metric: str
) -> Difference | None:
    both = [results for _, results in runs if baseline in results]
    if baseline is None or method == baseline or not both:
        return None
    ours, theirs = ([results[name].accuracies.get(metric, {}) for results in both] for name in (method, baseline))
    return paired_difference(ours, theirs)
