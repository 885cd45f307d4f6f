"""The columns of a report's tables, the same on the page and in Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fedmoe_pl.logs.summary import value_text
from fedmoe_pl.report.statistics import over_seeds
from fedmoe_pl.report.tables import Condition, Method, Table, difference
from fedmoe_pl.report.text import difference_text, has_published, over_seeds_text, published_text


class Choices(NamedTuple):
    """What the user of a report chose.

    Attributes:
        metric: the accuracy whose cost is compared, and which is listed by rounds; None for each condition's first.
        target: the value of it to reach, of an accuracy a fraction; None for what half of the methods reach.
        baseline: the method with which the others are compared; None for that of the runs' grid, if it has one.
        rounds: the rounds that a table lists.
    """

    metric: str | None = None
    target: float | None = None
    baseline: str | None = None
    rounds: Sequence[int] = ()

    def metric_of(self, condition: Condition) -> str:
        """The chosen metric, or the condition's first if it does not have that one."""
        return self.metric if self.metric in condition.metrics else condition.metrics[0]

    def baseline_of(self, condition: Condition) -> Method | None:
        """The method with which a condition's others are compared."""
        name = self.baseline or condition.methods[0].runs[0].cell.get("baseline")
        return next((method for method in condition.methods if name in (method.label, method.name)), None)


class Column(NamedTuple):
    """A column: its title, and a cell for each method."""

    title: str
    cells: list[str]


def main_columns(condition: Condition, metric: str, choices: Choices, mean: str) -> list[Column]:
    """A metric's mean and deviation over seeds, the paper's number, and the difference to the baseline.

    Args:
        condition: the methods.
        metric: the metric.
        choices: the baseline.
        mean: title of the first column.
    """
    methods, baseline = condition.methods, choices.baseline_of(condition)
    columns = [Column(mean, [over_seeds_text(metric, method.over_seeds(f"{metric}_mean")) for method in methods])]
    if has_published(condition, metric):
        columns.append(Column("paper", [published_text(method.published(metric)) for method in methods]))
    if baseline is not None:
        found = [None if method is baseline else difference(method, baseline, metric) for method in methods]
        columns.append(Column(f"to {baseline.label}", [difference_text(metric, each) for each in found]))
    return columns


def client_columns(condition: Condition, metric: str) -> list[Column]:
    """A metric's deviation over the clients and the mean of the worst tenth, both as means over seeds."""
    spreads = {"± over clients": "std", "worst tenth": "worst_tenth"}
    return [
        Column(title, [value_text(metric, method.over_seeds(f"{metric}_{name}").mean) for method in condition.methods])
        for title, name in spreads.items()
    ]


def curve_table(condition: Condition, metric: str, rounds: Sequence[int]) -> Table:
    """A metric after some rounds, mean and deviation over seeds; a dash for rounds that were not evaluated.

    Methods that were evaluated in none of them are left out.
    """
    rows = [(method.label, [_at_round(method, metric, round) for round in rounds]) for method in condition.methods]
    rows = [(label, cells) for label, cells in rows if {*cells} != {"-"}]
    return Table(["method", *(f"round {round}" for round in rounds)], rows)


def _at_round(method: Method, metric: str, round: int) -> str:
    rows = [row for run in method.runs for row in method.rounds(run) if row["round"] == round]
    values = [row.get(f"{metric}_mean", math.nan) for row in rows]
    if len(values) < len(method.runs) or any(math.isnan(value) for value in values):
        return "-"
    return over_seeds_text(metric, over_seeds(values))
