"""The sections of a report's page, one for each condition."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from fedmoe_pl.evaluation.evaluation import METRICS, Spread
from fedmoe_pl.logs.summary import value_text
from fedmoe_pl.report.blocks import Block, blocks_of
from fedmoe_pl.report.columns import Choices, Column, client_columns, main_columns
from fedmoe_pl.report.runs import metrics_of
from fedmoe_pl.report.style import Style
from fedmoe_pl.report.tables import Condition, Table
from fedmoe_pl.report.text import evaluated, explanation, rounds_text, run_text, seeds_text, words


class Group(NamedTuple):
    """Neighbouring columns of the table of methods, under a common title."""

    title: str
    columns: list[Column]


class Section(NamedTuple):
    """Everything that the page says of a condition.

    Attributes:
        title: the condition.
        subtitle: its data, and how many seeds there are.
        labels: the methods.
        rounds: the round of each method's result.
        groups: the other columns of the table of methods.
        legend: what the numbers are.
        blocks: the parts after it.
        every: the numbers of ``summary.csv`` of every run.
    """

    title: str
    subtitle: str
    labels: list[str]
    rounds: list[str]
    groups: list[Group]
    legend: list[str]
    blocks: list[Block]
    every: Table


def section_of(condition: Condition, styles: Mapping[str, Style], choices: Choices) -> Section:
    """The section of a condition.

    Args:
        condition: the methods.
        styles: the style of each method's label.
        choices: what the user of the report chose.
    """
    title = condition.name or condition.data or condition.settings[0].name
    facts = [condition.data if condition.data != title else "", seeds_text(condition)]
    return Section(
        title,
        "".join(f"{fact}. " for fact in facts if fact).strip(),
        [method.label for method in condition.methods],
        [rounds_text(method) for method in condition.methods],
        [_group(condition, metric, choices) for metric in condition.metrics],
        [f"{line}." for line in (*explanation(condition, choices.baseline_of(condition)), *evaluated(condition))],
        blocks_of(condition, styles, choices),
        _every(condition),
    )


def _group(condition: Condition, metric: str, choices: Choices) -> Group:
    columns = main_columns(condition, metric, choices, "mean")
    return Group(words(metric), [*columns, *client_columns(condition, metric)])


def _every(condition: Condition) -> Table:
    """The rows of all files ``summary.csv``: accuracies in percent, other metrics as they are."""
    runs = [run for setting in condition.settings for run in setting.runs]
    rows = [(run, row) for run in runs for row in run.summary]
    metrics = dict.fromkeys((*METRICS, *(metric for _, row in rows for metric in metrics_of(row))))
    spreads = {f"{metric}_{name}": metric for metric in metrics for name in Spread._fields}
    columns = spreads | {f"{name}_mean": name for name in ("validation_loss", "mean_gate_weight")}
    columns = {c: name for c, name in columns.items() if any(not math.isnan(row.get(c, math.nan)) for _, row in rows)}
    cells = [
        (
            f"{row['method']}, {run_text(run)}",
            [f"{int(row['round'])}", *(value_text(name, row.get(c, math.nan)) for c, name in columns.items())],
        )
        for run, row in rows
    ]
    return Table(["method, run", "round", *map(words, columns)], cells)
