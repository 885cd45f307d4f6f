"""The table of a grid as text in the terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from fedmoe_pl.benchmark.grid import value_name
from fedmoe_pl.benchmark.published import VARIANT, Published, PublishedNumber
from fedmoe_pl.benchmark.results import Row
from fedmoe_pl.evaluation.evaluation import METRICS
from fedmoe_pl.logs.summary import change_text, description, on_test_samples, value_text
from fedmoe_pl.report.statistics import INDEPENDENCE, SIGNIFICANCE, Difference

_SMALLEST_P = 1e-4
_WIDTH = 120  # of the legend's lines


def format_grid(rows: Sequence[Row], words: Mapping[str, str], baseline: str | None, paper: Sequence[Published]) -> str:
    """The table: a block for each condition, a line for each method, and a legend below.

    Args:
        rows: the rows, at least one.
        words: how the keys of the grid are shortened.
        baseline: the method with which the others are compared, or None.
        paper: the published numbers.

    Returns:
        Aligned plain text without a final newline.
    """
    metrics = metrics_of(rows)
    groups = {metric: _columns(rows, metric, baseline) for metric in metrics}
    heading = ["method", *(column for columns in groups.values() for column in columns)]
    lines = [
        [row.method, *(cell for metric in metrics for cell in _cells(row, metric, groups[metric]))] for row in rows
    ]
    widths = [max(len(line[index]) for line in (heading, *lines)) for index in range(len(heading))]
    text = [_metric_line(groups, widths), _line(heading, widths)]
    aligned = iter(lines)
    for condition, block in groupby(rows, lambda row: describe(row, words)):
        text += ["-" * len(text[1]), *([condition] if condition else [])]
        text += [_line(next(aligned), widths) for _ in block]
    below = [part for line in legend(rows, metrics, baseline, paper) for part in textwrap.wrap(line, _WIDTH)]
    return "\n".join([*(line.rstrip() for line in text), "", *below])


def metrics_of(rows: Sequence[Row]) -> list[str]:
    """The metrics that at least one row has."""
    return on_test_samples(dict.fromkeys(metric for row in rows for metric in row.numbers))


def has_paper(rows: Sequence[Row], metric: str) -> bool:
    """Whether at least one row has a published number of the metric."""
    return any(row.numbers[metric].paper for row in rows if metric in row.numbers)


def describe(row: Row, words: Mapping[str, str]) -> str:
    """The condition of a row and its seeds.

    Example:
        >>> describe(Row({"variant": "MNIST", "data.alpha": 0.5}, "FedAvg", ("", "", ""), [0, 1], {}), {})
        'MNIST, data.alpha = 0.5 (seeds 0, 1)'
    """
    values = [words_of(key, value, words) for key, value in row.condition.items()]
    seeds = f"(seed{'s' if len(row.seeds) > 1 else ''} {', '.join(map(str, row.seeds))})"
    return f"{', '.join(values)} {seeds}".strip()


def words_of(key: str, value: Any, words: Mapping[str, str]) -> str:
    """A value of a condition, with its key unless it is a variant."""
    return value_name(value) if key == VARIANT else f"{words.get(key, key)} = {value_name(value)}"


def published_percent(number: PublishedNumber | None) -> str:
    """A published number, with its standard deviation in brackets; a dash for none.

    Example:
        >>> published_percent((90.76, 0.82)), published_percent((90.0, None)), published_percent(None)
        ('90.76 (0.82)', '90.00', '-')
    """
    if number is None:
        return "-"
    mean, std = number
    return f"{mean:.2f}" if std is None else f"{mean:.2f} ({std:.2f})"


def points(metric: str, difference: Difference | None) -> str:
    """A difference, of accuracies in points, with a star if it is more than noise; a dash for none.

    Example:
        >>> points("local_test", Difference(0.0123, 0.001, 60, 3, True))
        '+1.23*'
        >>> points("local_test", Difference(-0.0123, 0.2, 60, 3, True))
        '-1.23 '
    """
    if difference is None or math.isnan(difference.mean):
        return "- "
    return f"{change_text(metric, difference.mean)}{'*' if difference.is_more_than_noise else ' '}"


def p_text(difference: Difference | None) -> str:
    """The p value of a difference; a dash for none."""
    if difference is None or math.isnan(difference.p_value):
        return "-"
    return f"<{_SMALLEST_P:.4f}" if difference.p_value < _SMALLEST_P else f"{difference.p_value:.4f}"


def legend(rows: Sequence[Row], metrics: Sequence[str], baseline: str | None, paper: Sequence[Published]) -> list[str]:
    """Lines that explain the numbers; methods with the same description share a line."""
    lines = [
        f"{'Accuracy in percent' if any(metric in METRICS for metric in metrics) else 'Metrics'}: mean over the "
        "clients of a run, then mean and sample standard deviation over seeds.",
        *(f"{metric.replace('_', ' ')}: {description(metric)}" for metric in metrics),
    ]
    if any(has_paper(rows, metric) for metric in metrics):
        lines.append(f"paper: {', '.join(dict.fromkeys(published.table for published in paper))}")
    if baseline is not None:
        lines += [
            f"difference: to {baseline}, in points; p: of a Wilcoxon signed-rank test over so many pairs of clients; "
            f"*: p < {SIGNIFICANCE} and the same sign in every seed",
            INDEPENDENCE,
        ]
    methods: dict[str, list[str]] = {}
    for row in rows:
        of_line = methods.setdefault(", ".join(row.evaluated), [])
        of_line += [] if row.method in of_line else [row.method]
    return lines + [f"{', '.join(names)}: {description}" for description, names in methods.items()]


def _columns(rows: Sequence[Row], metric: str, baseline: str | None) -> list[str]:
    of_paper = ["paper"] if has_paper(rows, metric) else []
    return ["mean", "std", *of_paper, *(["difference", "p", "pairs"] if baseline is not None else [])]


def _cells(row: Row, metric: str, columns: Sequence[str]) -> list[str]:
    number = row.numbers.get(metric)
    if number is None:
        return ["-"] * len(columns)
    texts = {
        "mean": value_text(metric, number.spread.mean),
        "std": value_text(metric, number.spread.std),
        "paper": published_percent(number.paper),
        "difference": points(metric, number.difference),
        "p": p_text(number.difference),
        "pairs": "-" if number.difference is None else str(number.difference.pairs),
    }
    return [texts[column] for column in columns]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = cells
    return f"{first:<{widths[0]}}" + "".join(
        f"  {cell:>{width}}" for cell, width in zip(others, widths[1:], strict=True)
    )


def _metric_line(groups: Mapping[str, Sequence[str]], widths: Sequence[int]) -> str:
    line, start = " " * widths[0], 1
    for metric, columns in groups.items():
        width = sum(widths[start : start + len(columns)]) + 2 * len(columns) - 2
        line += f"  {metric.replace('_', ' '):^{width}}"
        start += len(columns)
    return line
