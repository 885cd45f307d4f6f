"""The parts of a report's section: pictures, and tables beside that of the methods."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from fedmoe_pl.evaluation.evaluation import METRICS
from fedmoe_pl.logs.summary import axis_label, value_text
from fedmoe_pl.report.columns import Choices, curve_table
from fedmoe_pl.report.costs import costs, default_target
from fedmoe_pl.report.maps import class_counts, client_order, gate_figure, partition_figure
from fedmoe_pl.report.pictures import AMOUNTS, cost_figure, curves_figure, distribution_figure
from fedmoe_pl.report.runs import Row, RunFiles
from fedmoe_pl.report.settings import differences
from fedmoe_pl.report.style import Picture, Style, picture
from fedmoe_pl.report.tables import Condition, Method, Table
from fedmoe_pl.report.text import cost_cells, run_text, words

_CURVES = "Mean of the clients over rounds; several seeds as mean and a band of one standard deviation."
_BOXES = "One box per method over the clients of all seeds: quartiles, whiskers, diamond for the mean."


class Block(NamedTuple):
    """A part of a section under a title; ``is_long`` if it is closed at first."""

    title: str
    texts: list[str]
    table: Table | None
    pictures: list[Picture]
    is_long: bool = False


def blocks_of(condition: Condition, styles: Mapping[str, Style], choices: Choices) -> list[Block]:
    """The parts of a condition's section.

    Args:
        condition: the methods.
        styles: the style of each method's label.
        choices: the accuracy whose cost is compared, and the rounds that are listed.
    """
    blocks = [
        _curve_block(condition, styles, choices),
        Block("Distribution over clients", [], None, [*_distributions(condition, styles)]),
        _cost_block(condition, styles, choices),
        _gate_block(condition),
        _partition_block(condition),
        _difference_block(condition),
    ]
    return [block for block in blocks if block.texts or block.table or block.pictures]


def _curve_block(condition: Condition, styles: Mapping[str, Style], choices: Choices) -> Block:
    figures = {metric: curves_figure(condition.methods, metric, styles) for metric in condition.metrics}
    pictures = [
        _picture("curves", metric, condition, figure, _CURVES)
        for metric, figure in figures.items()
        if figure is not None
    ]
    if not choices.rounds:
        return Block("Learning curves", [], None, pictures)
    metric = choices.metric_of(condition)
    text = f"{axis_label(metric)}, mean over the clients, after evaluated rounds."
    return Block("Learning curves", [text], curve_table(condition, metric, choices.rounds), pictures)


def _picture(kind: str, what: str, condition: Condition, figure: Figure, caption: str) -> Picture:
    return picture(f"{kind} {what} {condition.name}", caption, figure)


def _distributions(condition: Condition, styles: Mapping[str, Style]) -> Iterator[Picture]:
    for metric in condition.metrics:
        figure = distribution_figure(condition.methods, metric, styles)
        if figure is not None:
            yield _picture("clients", metric, condition, figure, _BOXES)


def _cost_block(condition: Condition, styles: Mapping[str, Style], choices: Choices) -> Block:
    metric = choices.metric_of(condition)
    value = default_target(condition, metric) if choices.target is None else choices.target
    table, texts = None, []
    if not math.isnan(value):
        found = costs(condition.methods, metric, value, condition.lower_is_better(metric))
        rows = [(cost.label, cost_cells(metric, cost)) for cost in found]
        table = Table(["method", "rounds", "sent", "local training", "best of all rounds"], rows) if rows else None
        reached = value_text(metric, value) + (" percent" if metric in METRICS else "")
        texts = [
            f"Until the mean {words(metric)} over the clients first reached {reached} in an evaluated round: rounds, "
            "everything sent by or to any client, and all local training, with all rounds of the phases that a method "
            "starts from."
        ]
    pictures = []
    for amount, name in AMOUNTS.items():
        figure = cost_figure(condition.methods, metric, amount, styles)
        if figure is not None:
            caption = f"Mean of the clients over {name}; a line for each seed."
            pictures.append(_picture(amount, metric, condition, figure, caption))
    return Block("Cost to a target", texts if table else [], table, pictures)


def _gate_block(condition: Condition) -> Block:
    pictures, without = [], []
    for method in condition.methods:
        run = next((run for run in method.runs if any(row["method"] == method.name for row in run.gates)), None)
        if run is not None:
            rows = [row for row in run.gates if row["method"] == method.name]
            caption = f"{method.label}: mean gate weight on each client's own samples of a class ({run_text(run)})."
            pictures.append(_picture("gate", method.label, condition, gate_figure(rows, _order(run, rows)), caption))
        elif any(not math.isnan(row["mean_gate_weight"]) for row in _client_rows(method)):
            without.append(method.label)
    texts = [f"No gate_weights.csv in the runs of {', '.join(without)}: no picture."] if without else []
    return Block("Gate weights by client and class", texts, None, pictures)


def _client_rows(method: Method) -> Iterator[Row]:
    return (row for run in method.runs for row in run.clients if row["method"] == method.name)


def _order(run: RunFiles, rows: Sequence[Row]) -> list[int]:
    """The clients from left to right, as in the picture of the partition."""
    if not run.partition:
        return sorted({int(row["client"]) for row in rows})
    ids = [int(row["client"]) for row in run.partition]
    return [ids[place] for place in client_order(class_counts(run.partition))]


def _partition_block(condition: Condition) -> Block:
    runs = [run for setting in condition.settings for run in setting.runs]
    run = next((run for run in runs if run.partition), None)
    if run is None:
        return Block("Who holds what", ["The runs have no partition.csv: no picture."], None, [])
    counts = class_counts(run.partition)
    if not counts.shape[1]:
        return Block("Who holds what", [], None, [])
    caption = f"Training and validation samples by client and class ({run_text(run)})."
    drawn = _picture("partition", "", condition, partition_figure(counts), caption)
    return Block("Who holds what", [], None, [drawn])


def _difference_block(condition: Condition) -> Block:
    settings = condition.settings
    rows = differences([setting.values for setting in settings])
    if not rows:
        return Block("", [], None, [])
    text = "Keys of a phase are compared among the runs that have it. Runs that differ only in the seed are one column."
    table = Table(["key", *(setting.name for setting in settings)], [*rows.items()])
    title = f"What differs between the configurations of these runs ({len(rows)} keys)"
    return Block(title, [text], table, [], is_long=True)
