"""The sections of a report's page, one for each condition: its tables, texts and pictures."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from matplotlib.figure import Figure

from fedmoe_pl.report.costs import costs, default_target
from fedmoe_pl.report.maps import class_counts, client_order, gate_figure, partition_figure
from fedmoe_pl.report.pictures import AMOUNTS, cost_figure, curves_figure, distribution_figure
from fedmoe_pl.report.runs import Row, RunFiles
from fedmoe_pl.report.style import Picture, Style, picture
from fedmoe_pl.report.tables import Condition, Method, legend
from fedmoe_pl.report.text import (
    cost_cells,
    has_published,
    meaning,
    over_seeds_text,
    published_tables,
    published_text,
    rounds_text,
    seeds_text,
    words,
)
from fedmoe_pl.rounds.evaluation import METRICS, Spread
from fedmoe_pl.rounds.results import percent


class Table(NamedTuple):
    """A table: its header, and a name and cells for each row."""

    header: list[str]
    rows: list[tuple[str, list[str]]]


class Block(NamedTuple):
    """A part of a section under a title."""

    title: str
    texts: list[str]
    table: Table | None
    pictures: list[Picture]


class Group(NamedTuple):
    """Neighbouring columns of the table of methods, under a common title."""

    title: str
    columns: list[str]


class MethodRow(NamedTuple):
    """A row of the table of methods; ``groups`` has the cells of each group of columns."""

    label: str
    round: str
    groups: list[list[str]]


class Section(NamedTuple):
    """Everything that the page says of a condition."""

    title: str
    subtitle: str
    groups: list[Group]
    rows: list[MethodRow]
    legend: list[str]
    blocks: list[Block]
    every: Table


class Target(NamedTuple):
    """The accuracy whose cost is compared; None for what fits a condition."""

    metric: str | None
    value: float | None


def section_of(condition: Condition, styles: Mapping[str, Style], target: Target) -> Section:
    """The section of a condition.

    Args:
        condition: the methods.
        styles: the style of each method's label.
        target: the accuracy whose cost is compared.
    """
    metrics = condition.metrics
    title = condition.name or condition.data or condition.settings[0].name
    facts = [condition.data if condition.data != title else "", seeds_text(condition)]
    curves = [
        _picture("curves", metric, condition, curves_figure(condition.methods, metric, styles), _CURVES)
        for metric in metrics
    ]
    blocks = [
        Block("Learning curves", [], None, curves),
        Block("Distribution over clients", [], None, [*_distributions(condition, styles)]),
        _cost_block(condition, styles, target),
        _gate_block(condition),
        _partition_block(condition),
    ]
    return Section(
        title,
        "".join(f"{fact[0].upper()}{fact[1:]}. " for fact in facts if fact).strip(),
        [_group(condition, metric) for metric in metrics],
        [_row(condition, method, metrics) for method in condition.methods],
        _legend(condition),
        [block for block in blocks if block.texts or block.table or block.pictures],
        _every(condition),
    )


_CURVES = "Mean accuracy of the clients over rounds; several seeds as mean and a band of one standard deviation."
_BOXES = "One box per method over the clients of all seeds: quartiles, whiskers, diamond for the mean."


def _group(condition: Condition, metric: str) -> Group:
    mean = "mean ± over seeds" if condition.seeds > 1 else "mean"
    paper = ["paper"] if has_published(condition, metric) else []
    return Group(words(metric), [mean, *paper, "± over clients", "worst tenth"])


def _row(condition: Condition, method: Method, metrics: Sequence[str]) -> MethodRow:
    groups = []
    for metric in metrics:
        paper = [published_text(method.published(metric))] if has_published(condition, metric) else []
        over_clients, worst = (method.over_seeds(f"{metric}_{name}").mean for name in ("std", "worst_tenth"))
        mean = over_seeds_text(method.over_seeds(f"{metric}_mean"))
        groups.append([mean, *paper, percent(over_clients), percent(worst)])
    return MethodRow(method.label, rounds_text(method), groups)


def _legend(condition: Condition) -> list[str]:
    seeds = "; ± is the sample standard deviation over seeds" if condition.seeds > 1 else ""
    first = f"Accuracy in percent, mean over the clients{seeds}. The deviation over clients is the population's."
    papers = [f"Paper: {table}." for table in published_tables(condition)]
    evaluated = [f"{', '.join(names)}: {text}." for text, names in legend(condition.methods).items()]
    return [first, *(f"{line}." for line in meaning(condition.metrics)), *papers, *evaluated]


def _picture(kind: str, what: str, condition: Condition, figure: Figure, caption: str) -> Picture:
    return picture(f"{kind} {what} {condition.name}", caption, figure)


def _distributions(condition: Condition, styles: Mapping[str, Style]) -> Iterator[Picture]:
    for metric in condition.metrics:
        figure = distribution_figure(condition.methods, metric, styles)
        if figure is not None:
            yield _picture("clients", metric, condition, figure, _BOXES)


def _cost_block(condition: Condition, styles: Mapping[str, Style], target: Target) -> Block:
    metric = target.metric if target.metric in condition.metrics else condition.metrics[0]
    value = default_target(condition, metric) if target.value is None else target.value
    table, texts = None, []
    if not math.isnan(value):
        rows = [(cost.label, cost_cells(cost)) for cost in costs(condition.methods, metric, value)]
        table = Table(["method", "rounds", "sent", "local training", "best of all rounds"], rows) if rows else None
        texts = [
            f"Until the mean {words(metric)} over the clients first reached {percent(value)} percent in an evaluated "
            "round: the method's own rounds, everything sent by or to any client, and all local training. The costs of "
            "a phase that a method starts from are not counted."
        ]
    pictures = []
    for amount, name in AMOUNTS.items():
        figure = cost_figure(condition.methods, metric, amount, styles)
        if figure is not None:
            caption = f"Mean accuracy of the clients over {name}; a line for each seed."
            pictures.append(_picture(amount, metric, condition, figure, caption))
    return Block("Cost to a target", texts if table else [], table, pictures)


def _gate_block(condition: Condition) -> Block:
    pictures, without = [], []
    for method in condition.methods:
        run = next((run for run in method.runs if any(row["method"] == method.name for row in run.gates)), None)
        if run is not None:
            rows = [row for row in run.gates if row["method"] == method.name]
            caption = f"{method.label}: mean gate weight on each client's own samples of a class ({_run_text(run)})."
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
    caption = f"Training and validation samples by client and class ({_run_text(run)})."
    drawn = _picture("partition", "", condition, partition_figure(counts), caption)
    return Block("Who holds what", [], None, [drawn])


def _run_text(run: RunFiles) -> str:
    return run.name if run.seed is None else f"{run.name}, seed {run.seed}"


def _every(condition: Condition) -> Table:
    """The rows of all files ``summary.csv``: accuracies in percent, losses and gate weights as they are."""
    runs = [run for setting in condition.settings for run in setting.runs]
    spreads = [f"{metric}_{name}" for metric in METRICS for name in Spread._fields]
    others = ["validation_loss_mean", "mean_gate_weight_mean"]
    rows = [(run, row) for run in runs for row in run.summary]
    columns = [c for c in (*spreads, *others) if any(not math.isnan(row.get(c, math.nan)) for _, row in rows)]
    cells = [
        (
            f"{row['method']}, {_run_text(run)}",
            [f"{int(row['round'])}", *(_number(row.get(c, math.nan), c in spreads) for c in columns)],
        )
        for run, row in rows
    ]
    return Table(["method, run", "round", *map(words, columns)], cells)


def _number(value: float, is_accuracy: bool) -> str:
    return percent(value) if is_accuracy else "-" if math.isnan(value) else f"{value:.4f}"
