"""The page of a report: one HTML file that needs no other file and no network."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from fedmoe_pl.callbacks.figures import INK, Style, by_class, gate_figure, partition_figure
from fedmoe_pl.evaluation.results import ACCURACIES, Spread
from fedmoe_pl.logs.summary import axis_label, value_text
from fedmoe_pl.report.costs import cost_table, cost_text, default_target
from fedmoe_pl.report.pictures import AMOUNTS, Picture, cost_figure, curves_figure, distribution_figure, picture
from fedmoe_pl.report.runs import metrics_of
from fedmoe_pl.report.settings import differences
from fedmoe_pl.report.tables import (
    Column,
    Condition,
    Table,
    client_columns,
    clients_table,
    curve_table,
    evaluated,
    explanation,
    main_columns,
    words,
)

_LONGEST = 120  # characters of a configuration's value


class Block(NamedTuple):
    """A part of a section under a title; ``is_long`` if it is closed at first."""

    title: str
    text: str = ""
    table: Table | None = None
    pictures: Sequence[Picture] = ()
    is_long: bool = False


class Section(NamedTuple):
    """Everything that the page says of a condition."""

    condition: Condition
    title: str
    subtitle: str
    groups: list[tuple[str, list[Column]]]  # of the table of methods, under common titles
    legend: list[str]
    blocks: list[Block]
    every: Table  # the numbers of all files summary.csv


def page(sections: Sequence[Section], styles: Mapping[str, Style], facts: Mapping[str, Any]) -> str:
    """The page as HTML.

    ``facts`` are ``title``, ``origin`` (when and where it was made), ``command``, ``notes``, ``folder`` (of the PDFs),
    ``trials`` (of a search).
    """
    environment = Environment(loader=PackageLoader("fedmoe_pl.report", ""), autoescape=True, undefined=StrictUndefined)
    # names may be broken into lines after punctuation
    environment.filters["breakable"] = lambda text: Markup(re.sub(r"([/,=_])(?=\S)", r"\1<wbr>", str(escape(text))))
    colors = {label: "currentColor" if style.color == INK else style.color for label, style in styles.items()}
    conditions = [section.condition for section in sections]
    runs = [run for condition in conditions for run in condition.runs]
    settings = sum(len(condition.settings) for condition in conditions)
    # the keys in which conditions differ, each of which is the same in all settings of a condition
    rows = differences([_agreed(condition) for condition in conditions])
    shown = [
        [key, *(value if len(value) <= _LONGEST else f"{value[:_LONGEST]}..." for value in values)]
        for key, values in rows.items()
    ]
    return environment.get_template("page.html").render(
        sections=sections,
        colors=colors,
        runs=runs,
        is_repeated=settings == 1 < len(runs),
        differences=Table(["key", *(condition.name for condition in conditions)], shown),
        **facts,
    )


def _agreed(condition: Condition) -> Mapping[str, Any]:
    """The values in which all settings agree."""
    first, *others = (setting.values for setting in condition.settings)
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def section_of(condition: Condition, styles: Mapping[str, Style]) -> Section:
    """The section of a condition."""
    title = condition.name or condition.data or condition.settings[0].name
    facts = [condition.data if condition.data != title else "", condition.seeds_text]
    blocks = [
        _curve_block(condition, styles),
        _distribution_block(condition, styles),
        _cost_block(condition, styles),
        _gate_block(condition),
        _partition_block(condition),
        _difference_block(condition),
    ]
    return Section(
        condition,
        title,
        "".join(f"{fact}. " for fact in facts if fact).strip(),
        [
            (words(metric), [*main_columns(condition, metric, "mean"), *client_columns(condition, metric)])
            for metric in condition.metrics
        ],
        [f"{line}." for line in (*explanation(condition), *evaluated(condition.methods))],
        [block for block in blocks if block.text or block.table or block.pictures],
        _every(condition),
    )


def _every(condition: Condition) -> Table:
    """The rows of all files ``summary.csv``: accuracies in percent, other metrics as they are."""
    rows = [(run, row) for run in condition.runs for row in run.summary]
    metrics = dict.fromkeys((*ACCURACIES, *(metric for _, row in rows for metric in metrics_of(row))))
    suffixes = (*Spread._fields, "pooled", "clients")
    columns = {f"{metric}_{suffix}": metric for metric in metrics for suffix in suffixes}
    columns |= {f"{name}_mean": name for name in ("validation_loss", "mean_gate_weight")}
    columns = {c: name for c, name in columns.items() if any(not math.isnan(row.get(c, math.nan)) for _, row in rows)}
    cells = [
        [
            f"{row['method']}, {run.text}",
            f"{int(row['round'])}",
            *(_number(c, name, row.get(c, math.nan)) for c, name in columns.items()),
        ]
        for run, row in rows
    ]
    return Table(["method, run", "round", *map(words, columns)], cells)


def _number(column: str, metric: str, value: float) -> str:
    """A number of ``summary.csv``: how many clients have the metric, in full, or a value of it."""
    return f"{value:.0f}" if column.endswith("_clients") and not math.isnan(value) else value_text(metric, value)


def _curve_block(condition: Condition, styles: Mapping[str, Style]) -> Block:
    caption = "Mean of the clients over rounds"
    if any(len(method.runs) > 1 for method in condition.methods):
        caption += "; several seeds as mean and a band of one standard deviation"
    pictures = [
        picture(f"curves {metric} {condition.name}", f"{caption}.", figure)
        for metric in condition.metrics
        if (figure := curves_figure(condition.methods, metric, styles))
    ]
    once = [
        f"{method.label} ({'one round' if last == 1 else f'only round {last} was evaluated: evaluate_every_n_rounds'})"
        for method in condition.methods
        if all(len(run.rounds) == 1 for run in method.runs) and (last := max(int(r["round"]) for r in method.results))
    ]
    why = f"No curve of {', '.join(once)}." if once else ""
    if not condition.choices.rounds:
        return Block("Learning curves", why, pictures=pictures)
    of = axis_label(condition.metric)
    text = f"{of}, mean over the clients; a dash where a method was not evaluated. {why}".rstrip()
    return Block("Learning curves", text, curve_table(condition), pictures)


def _distribution_block(condition: Condition, styles: Mapping[str, Style]) -> Block:
    of = "the clients of all seeds" if any(len(method.runs) > 1 for method in condition.methods) else "the clients"
    caption = f"One box per method over {of}: quartiles, whiskers, diamond for the mean."
    pictures = [
        picture(f"clients {metric} {condition.name}", caption, figure)
        for metric in condition.metrics
        if (figure := distribution_figure(condition.methods, metric, styles))
    ]
    table = clients_table(condition)
    text = f"{axis_label(condition.metric)} of each client{', mean over seeds' if len(condition.runs) > 1 else ''}."
    return Block("Distribution over clients", text if table else "", table, pictures)


def _cost_block(condition: Condition, styles: Mapping[str, Style]) -> Block:
    metric = condition.metric
    chosen = condition.choices.target
    target = default_target(condition, metric) if chosen is None else chosen
    table = None if math.isnan(target) else cost_table(condition, metric, target)
    pictures = []
    for amount, name in AMOUNTS.items():
        if figure := cost_figure(condition.methods, metric, amount, styles):
            caption = f"Mean of the clients over {name}; a line for each seed."
            pictures.append(picture(f"{amount} {metric} {condition.name}", caption, figure))
    if table is None or not table.rows:
        return Block("Cost to a target", pictures=pictures)
    return Block("Cost to a target", cost_text(condition, target), table, pictures)


def _gate_block(condition: Condition) -> Block:
    pictures, without = [], []
    for method in condition.methods:
        run = next((run for run in method.runs if run.gates), None)
        if run is not None:
            means = {int(row["client"]): row.get("mean_gate_weight", math.nan) for row in run.clients}
            is_known = all(row["client"] < len(run.partition) for row in run.gates)
            counts = by_class(run.partition) if is_known else None
            caption = f"{method.label}: mean gate weight on each client's own samples of a class ({run.text})."
            drawn = gate_figure(run.gates, means, counts)
            pictures.append(picture(f"gate {method.label} {condition.name}", caption, drawn))
        elif any(not math.isnan(row.get("mean_gate_weight", math.nan)) for run in method.runs for row in run.clients):
            without.append(method.label)
    text = f"No gate_weights.csv in the runs of {', '.join(without)}: no picture." if without else ""
    return Block("Gate weights by client and class", text, pictures=pictures)


def _partition_block(condition: Condition) -> Block:
    run = next((run for run in condition.runs if run.partition), None)
    if run is None:
        return Block("Who holds what", "The runs have no partition.csv: no picture.")
    caption = f"Samples by client and by class, or by bin of the target ({run.text})."
    drawn = picture(f"partition {condition.name}", caption, partition_figure(run.partition))
    return Block("Who holds what", pictures=[drawn])


def _difference_block(condition: Condition) -> Block:
    rows = differences([setting.values for setting in condition.settings])
    if not rows:
        return Block("")
    title = f"What differs between the configurations of these runs ({len(rows)} keys)"
    text = "Keys of a phase are compared among the runs that have it. Runs that differ only in the seed are one column."
    header = ["key", *(setting.name for setting in condition.settings)]
    return Block(title, text, Table(header, [[key, *values] for key, values in rows.items()]), is_long=True)
