"""Writes evaluations as rows of files and as the table at the end of a run."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path

from fedmoe_pl.checkpoints.files import replacing, unwritable
from fedmoe_pl.evaluation.results import ACCURACIES, LOSS, Evaluation, Spread

DESCRIPTIONS = {
    "local_test": "accuracy on the client's held-out samples",
    "reweighted_test": "accuracy per class on the global test set, weighted by the client's class shares",
    "global_test": "accuracy on the global test set, the same for all clients",
    "validation": "accuracy on the client's validation samples",
}
"""What each accuracy means, in the order of the table's columns."""
_SAMPLES: dict[str, str] = {
    "local_test": "the client's held-out samples",
    "global_test": "the global test set",
    "validation": "the client's validation samples",
}


def evaluation_row(evaluation: Evaluation) -> dict[str, object]:
    """An evaluation as a row: what was evaluated, then the spread of each accuracy (a fraction) over the clients.

    The loss and the other metrics follow, with the number of clients that have each of them, and the names of those of
    which a lower value is better, if there are any.
    """
    row: dict[str, object] = {
        "method": evaluation.method,
        "round": evaluation.round,
        "model": evaluation.model,
        "clients": evaluation.evaluated,
        "evaluation_point": evaluation.evaluation_point,
        "selection": evaluation.selection,
    }
    for metric in ACCURACIES:
        row |= _spread_columns(evaluation, metric)
    row["local_test_pooled"] = evaluation.local_test_pooled
    row["validation_loss_mean"] = evaluation.spread_or_nan("validation_loss").mean
    for metric in evaluation.metrics[len(ACCURACIES) :]:
        row |= _spread_columns(evaluation, metric) | {f"{metric}_clients": len(evaluation.values(metric))}
    lower = [metric for metric in evaluation.metrics if metric in evaluation.lower_is_better]
    return row | ({"lower_is_better": " ".join(lower)} if lower else {})


def _spread_columns(evaluation: Evaluation, metric: str) -> dict[str, float]:
    return {f"{metric}_{name}": value for name, value in evaluation.spread_or_nan(metric)._asdict().items()}


def summary_row(evaluation: Evaluation) -> dict[str, object]:
    """One row of ``summary.csv``: that of ``rounds.csv``, and the mean over clients of their mean gate weight."""
    return evaluation_row(evaluation) | {"mean_gate_weight_mean": evaluation.spread_or_nan("mean_gate_weight").mean}


def write_csv(path: Path, rows: Iterable[Mapping[str, object]]) -> int:
    """Writes the rows under a header of their keys; a reader never sees half a file.

    Floats are written with all their digits, so that equal results give equal bytes; nan becomes an empty field.
    """
    columns = dict.fromkeys(column for row in rows for column in row) if isinstance(rows, Sequence) else None
    rows = iter(rows)
    first = next(rows, {})
    count = 0
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(first if columns is None else columns), restval="", lineterminator="\n")
        writer.writeheader()
        for row in chain([first] if first else [], rows):
            writer.writerow(_fields(row))
            count += 1
    return count


def append_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Appends rows to a file that :func:`write_csv` wrote, all of them or none."""
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(_fields(row).values() for row in rows)
    try:
        with path.open("ab") as file:
            file.write(text.getvalue().encode())
    except OSError as error:
        raise unwritable(path, error) from error


def _fields(row: Mapping[str, object]) -> dict[str, object]:
    return {name: "" if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}


def value_text(metric: str, value: float) -> str:
    """An accuracy in percent, or the value of another metric with four digits; a dash for nan.

    Example:
        >>> value_text("global_test", 0.71234), value_text("global_test_rmse", 53.4567), value_text("loss", 123456.0)
        ('71.23', '53.46', '1.2e+05')
    """
    if math.isnan(value):
        return "-"
    texts = (f"{value:.{digits}g}" for digits in (4, 3, 2, 1))
    return f"{100 * value:.2f}" if metric in ACCURACIES else next(text for text in texts if len(text) <= 7)


def axis_label(metric: str) -> str:
    """The name of a metric in words, for a picture in which accuracies are in percent."""
    return metric.replace("_", " ") + (", percent" if metric in ACCURACIES else "")


def scale(metric: str) -> int:
    """The factor of a metric in pictures: 100 for accuracies, which are fractions."""
    return 100 if metric in ACCURACIES else 1


def change_text(metric: str, change: float) -> str:
    """A change of a metric: of an accuracy in points.

    Example:
        >>> change_text("local_test", 0.0123), change_text("local_test_rmse", -0.0123)
        ('+1.23', '-0.0123')
    """
    return f"{100 * change:+.2f}" if metric in ACCURACIES else f"{change:+.3g}"


def format_table(evaluations: Iterable[Evaluation], metrics: Sequence[str] | None = None) -> str:
    """The table at the end of a run: one row per method, accuracies in percent, and a legend below."""
    evaluations = list(evaluations)
    metrics = present_metrics(evaluations) if metrics is None else metrics
    width = max(len("method"), *(len(e.method) for e in evaluations))
    # One group of columns per metric, as wide as its heading or its three numbers.
    heading = "".join(f"   {metric.replace('_', ' '):^27}" for metric in metrics)
    columns = "".join(f"   {'mean':>7} {'std':>7} {'worst tenth':>11}" for _ in metrics)
    lines = [(" " * width + heading).rstrip(), f"{'method':<{width}}{columns}", "-" * (width + len(columns))]
    for evaluation in evaluations:
        cells = "".join(_cells(metric, evaluation.spread_or_nan(metric)) for metric in metrics)
        lines.append(f"{evaluation.method:<{width}}{cells}")
    return "\n".join([*lines, "", *_legend(evaluations, metrics)])


def present_metrics(evaluations: Iterable[Evaluation]) -> list[str]:
    """The accuracies and other metrics on test samples that at least one client of one of the evaluations has.

    The loss is one of them only if there are no others.
    """
    return on_test_samples(_present(list(evaluations)))


def on_test_samples(metrics: Iterable[str]) -> list[str]:
    """Those of the metrics that are on test samples, or all if none is; the loss only if there are no others."""
    metrics = [*metrics]
    found = [each for each in metrics if each.startswith(("local_test", "reweighted_test", "global_test"))] or metrics
    return [metric for metric in found if not metric.endswith(f"_{LOSS}")] or found


def format_validation(evaluations: Sequence[Evaluation]) -> str:
    """The table of accuracy and other metrics on validation samples; of the loss where there is no accuracy."""
    found = [metric for metric in _present(evaluations) if metric.startswith("validation")]
    return format_table(evaluations, found if "validation" in found else [*found, "validation_loss"])


def _present(evaluations: Sequence[Evaluation]) -> list[str]:
    metrics = dict.fromkeys(metric for e in evaluations for metric in e.metrics)
    return [metric for metric in metrics if any(e.values(metric) for e in evaluations)]


def _cells(metric: str, spread: Spread) -> str:
    return "   {:>7} {:>7} {:>11}".format(*(value_text(metric, value) for value in spread))


def _legend(evaluations: list[Evaluation], metrics: Sequence[str]) -> list[str]:
    """Lines that explain the numbers; methods with the same description share a line."""
    asked = max((e.evaluated for e in evaluations), key=lambda each: each.startswith("all"))
    clients = "one client" if asked == "all 1" else f"{asked} clients"
    what = "Accuracy in percent" if any(metric in ACCURACIES for metric in metrics) else "Metrics"
    lines = [f"{what} over {clients}: mean, standard deviation, mean of the worst tenth."]
    lower = {metric for e in evaluations for metric in e.lower_is_better}
    lines += [
        f"{metric.replace('_', ' ')}: {description(metric, metric in lower)}{_lacking(metric, evaluations)}"
        for metric in metrics
    ]
    methods: dict[str, list[str]] = {}
    for e in evaluations:
        over = "" if e.evaluated == asked else f", over {e.evaluated} clients"
        methods.setdefault(f"{e.model}, {e.evaluation_point}, {e.selection} (round {e.round}){over}", []).append(
            e.method
        )
    return lines + [f"{', '.join(names)}: {description}" for description, names in methods.items()]


def _lacking(metric: str, evaluations: Sequence[Evaluation]) -> str:
    evaluated = (max(len(e.values(each)) for each in e.metrics) for e in evaluations)
    return having([(e.method, len(e.values(metric)), of_all) for e, of_all in zip(evaluations, evaluated, strict=True)])


def having(counts: Iterable[tuple[str, int, int]], of: str = "") -> str:
    """How many clients have a metric, if some do not; names the methods unless it is the same for all that have it.

    ``counts`` are the name of each method, the number of its clients that have the metric, and that of all its clients.

    Example:
        >>> having([("Local", 2, 3), ("FedAvg", 2, 3), ("FedProto", 0, 3)])
        '; 2 of the 3 clients have it'
        >>> having([("Local", 2, 3), ("FedAvg", 3, 3)], " of all seeds")
        '; Local: 2 of the 3 clients of all seeds have it'
    """
    methods: dict[tuple[int, int], list[str]] = {}
    for method, some, of_all in counts:
        if some:
            methods.setdefault((some, of_all), []).append(method)
    return "".join(
        f"; {', '.join(names) + ': ' if len(methods) > 1 else ''}{some} of the {of_all} clients{of} have it"
        for (some, of_all), names in methods.items()
        if some < of_all
    )


def description(metric: str, lower_is_better: bool = False) -> str:
    """What an accuracy or another metric means."""
    if metric in DESCRIPTIONS:
        return DESCRIPTIONS[metric]
    split = next(split for split in _SAMPLES if metric.startswith(f"{split}_"))
    name = metric.removeprefix(f"{split}_").replace("_", " ")
    return f"{name} on {_SAMPLES[split]}{'; lower is better' if lower_is_better else ''}"
