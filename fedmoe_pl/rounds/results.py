"""Writes evaluations as rows of files and as the table at the end of a run."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from fedmoe_pl.rounds.evaluation import METRICS, Evaluation, Spread
from fedmoe_pl.rounds.writing import replacing, unwritable

DESCRIPTIONS = {
    "local_test": "accuracy per class on the global test set, weighted with the client's class shares",
    "local_test_held_out": "accuracy on the client's held-out samples",
    "global_test": "accuracy on the global test set, the same for all clients",
    "validation": "accuracy on the client's validation samples",
}
"""What each accuracy means, in the order of the table's columns."""


def round_row(evaluation: Evaluation) -> dict[str, object]:
    """One row of ``rounds.csv``: what was evaluated, then the spread of each accuracy (a fraction) over the clients.

    Example:
        >>> from fedmoe_pl.rounds.evaluation import ClientEvaluation
        >>> clients = [ClientEvaluation(0, 10, 0.75, float("nan"), 0.5, float("nan"))]
        >>> row = round_row(Evaluation("FedAvg", 3, "global expert", "after aggregation", "last round", clients))
        >>> row["round"], row["clients"], row["local_test_mean"], row["global_test_worst_tenth"]
        (3, 'all 1', 0.75, 0.5)
    """
    row: dict[str, object] = {
        "method": evaluation.method,
        "round": evaluation.round,
        "model": evaluation.model,
        "clients": evaluation.evaluated,
        "moment": evaluation.moment,
        "selection": evaluation.selection,
    }
    for metric in METRICS:
        row |= {f"{metric}_{name}": value for name, value in evaluation.spread(metric)._asdict().items()}
    return row | {"validation_loss_mean": evaluation.spread("validation_loss").mean}


def summary_row(evaluation: Evaluation) -> dict[str, object]:
    """One row of ``summary.csv``: that of ``rounds.csv``, and the mean over clients of their mean gate weight."""
    return round_row(evaluation) | {"mean_gate_weight_mean": evaluation.spread("mean_gate_weight").mean}


def client_rows(evaluation: Evaluation) -> list[dict[str, object]]:
    """One method's rows of ``clients.csv``, one per client; accuracies and gate weights are fractions."""
    return [
        {
            "method": evaluation.method,
            "round": evaluation.round,
            "model": evaluation.model,
            "moment": evaluation.moment,
            "selection": evaluation.selection,
            "client": client.client,
            "n_train": client.n_train,
            **{metric: getattr(client, metric) for metric in METRICS},
            "mean_gate_weight": client.mean_gate_weight,
        }
        for client in evaluation.clients
    ]


def write_csv(path: Path, rows: Iterable[Mapping[str, object]]) -> int:
    """Writes the rows under a header of their keys; a reader never sees half a file.

    Floats are written with all their digits, so that equal results give equal bytes; nan becomes an empty field.

    Args:
        path: the file, which is replaced if it exists; its folder must exist.
        rows: one mapping per row, from column to value, all with the same columns as the first.

    Returns:
        The number of rows.

    Raises:
        MisconfigurationException: if the file cannot be written; an old one stays.
    """
    rows = iter(rows)
    first = next(rows, {})
    count = 0
    with replacing(path) as temporary, temporary.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(first), lineterminator="\n")
        writer.writeheader()
        for row in chain([first] if first else [], rows):
            writer.writerow(_fields(row))
            count += 1
    return count


def append_csv(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Appends rows to a file that :func:`write_csv` wrote, all of them or none.

    Args:
        path: the file.
        rows: rows with the file's columns, in the same order.

    Raises:
        MisconfigurationException: if the file cannot be written.
    """
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(_fields(row).values() for row in rows)
    try:
        with path.open("ab") as file:
            file.write(text.getvalue().encode())
    except OSError as error:
        raise unwritable(path, error) from error


def _fields(row: Mapping[str, object]) -> dict[str, object]:
    return {column: _field(value) for column, value in row.items()}


def _field(value: object) -> object:
    if not isinstance(value, float):
        return value
    return "" if math.isnan(value) else repr(float(value))


def prediction_rows(
    evaluation: Evaluation, client: int, samples: Tensor, labels: Tensor, logits: Tensor, gate_weights: Tensor | None
) -> Iterator[dict[str, object]]:
    """Rows of ``predictions.csv``, one per sample.

    Args:
        evaluation: the evaluation of the method.
        client: the client whose model predicted.
        samples: indices of the samples in the data module, shape (n,).
        labels: their classes, shape (n,).
        logits: shape (n, C).
        gate_weights: shape (n, experts); the global experts' total weight is written. None without a gate.
    """
    weights = [math.nan] * len(samples) if gate_weights is None else gate_weights[:, :-1].sum(dim=1).tolist()
    columns = zip(samples.tolist(), labels.tolist(), logits.argmax(1).tolist(), weights, strict=True)
    names = ("sample", "label", "prediction", "gate_weight")
    for values in columns:
        yield {
            "method": evaluation.method,
            "moment": evaluation.moment,
            "client": client,
            **dict(zip(names, values, strict=True)),
        }


def percent(fraction: float) -> str:
    """A fraction as percent with two decimals; a dash for nan.

    Example:
        >>> percent(0.71234), percent(float("nan"))
        ('71.23', '-')
    """
    return "-" if math.isnan(fraction) else f"{100 * fraction:.2f}"


def format_table(evaluations: Iterable[Evaluation], metrics: Sequence[str] | None = None) -> str:
    """The table at the end of a run: one row per method, accuracies in percent, and a legend below.

    Args:
        evaluations: the final evaluation of each method, at least one, in the order of the rows.
        metrics: the columns; None takes the test accuracies that at least one client has.

    Returns:
        Aligned plain text without a final newline.
    """
    evaluations = list(evaluations)
    metrics = present_metrics(evaluations) if metrics is None else metrics
    width = max(len("method"), *(len(e.method) for e in evaluations))
    # One group of columns per metric, as wide as its heading or its three numbers.
    heading = "".join(f"   {metric.replace('_', ' '):^27}" for metric in metrics)
    columns = "".join(f"   {'mean':>7} {'std':>7} {'worst tenth':>11}" for _ in metrics)
    lines = [(" " * width + heading).rstrip(), f"{'method':<{width}}{columns}", "-" * (width + len(columns))]
    for evaluation in evaluations:
        cells = "".join(_cells(evaluation.spread(metric)) for metric in metrics)
        lines.append(f"{evaluation.method:<{width}}{cells}")
    return "\n".join([*lines, "", *_legend(evaluations, metrics)])


def present_metrics(evaluations: Iterable[Evaluation]) -> list[str]:
    """The test accuracies that at least one client of one of the evaluations has."""
    evaluations = list(evaluations)
    tests = [metric for metric in DESCRIPTIONS if metric != "validation"]
    return [metric for metric in tests if not all(math.isnan(e.spread(metric).mean) for e in evaluations)]


def _cells(spread: Spread) -> str:
    return f"   {percent(spread.mean):>7} {percent(spread.std):>7} {percent(spread.worst_tenth):>11}"


def _legend(evaluations: list[Evaluation], metrics: Sequence[str]) -> list[str]:
    """Lines that explain the numbers; methods with the same description share a line."""
    clients = " or ".join(dict.fromkeys(e.evaluated for e in evaluations))
    lines = [f"Accuracy in percent over {clients} clients: mean, standard deviation, mean of the worst tenth."]
    lines += [f"{metric.replace('_', ' ')}: {DESCRIPTIONS[metric]}" for metric in metrics]
    methods: dict[str, list[str]] = {}
    for e in evaluations:
        methods.setdefault(f"{e.model}, {e.moment}, {e.selection} (round {e.round})", []).append(e.method)
    return lines + [f"{', '.join(names)}: {description}" for description, names in methods.items()]


def mean_gate_weight_by_class(evaluation: Evaluation, num_classes: int) -> Tensor:
    """Mean total weight of the global experts on each client's own samples of each class.

    Args:
        evaluation: an evaluation of a model with a gate.
        num_classes: number of classes of the data.

    Returns:
        Float64 tensor of shape (clients, num_classes); nan where a client has no sample of the class.
    """
    rows = []
    for client in evaluation.clients:
        if client.global_weights is None or client.gate_labels is None:
            rows.append(torch.full((num_classes,), math.nan, dtype=torch.float64))
        else:
            rows.append(_means_by_class(client.global_weights, client.gate_labels, num_classes))
    return torch.stack(rows)


def gate_rows(evaluation: Evaluation, num_classes: int) -> Iterator[dict[str, object]]:
    """One method's rows of ``gate_weights.csv``: the gate's mean weights on each client's own samples of each class.

    A client has one row, for the total weight of the global experts. If no expert is global, it has a row for each.

    Args:
        evaluation: an evaluation; without a trained gate, there are no rows.
        num_classes: number of classes of the data.

    Yields:
        Columns ``class_<c>`` are fractions; nan where the client has no sample of the class.
    """
    for client in evaluation.clients:
        if client.gate_weights is None or client.gate_labels is None:
            continue
        if client.global_weights is not None:
            weights = {"global": client.global_weights}
        else:
            weights = {str(expert): column for expert, column in enumerate(client.gate_weights.unbind(dim=1))}
        for expert, column in weights.items():
            means = _means_by_class(column, client.gate_labels, num_classes).tolist()
            yield {
                "method": evaluation.method,
                "moment": evaluation.moment,
                "client": client.client,
                "expert": expert,
                **{f"class_{label}": mean for label, mean in enumerate(means)},
            }


def _means_by_class(weights: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Mean of the weights, shape (n,), of each class, shape (num_classes,); nan for classes without a sample."""
    labels = labels.cpu()
    sums = torch.zeros(num_classes, dtype=torch.float64).index_add(0, labels, weights.detach().cpu().double())
    return sums / torch.bincount(labels, minlength=num_classes)  # 0 / 0 is nan


def expert_usage(evaluation: Evaluation) -> Tensor:
    """For each client and expert, the share of the client's own samples whose largest gate weight is that expert's.

    Args:
        evaluation: an evaluation of a model with a gate.

    Returns:
        Float64 tensor of shape (clients, experts); nan for experts that a client lacks.
    """
    weights = [client.gate_weights for client in evaluation.clients]
    most = max(client_weights.shape[1] for client_weights in weights if client_weights is not None)
    shares = torch.full((len(weights), most), math.nan, dtype=torch.float64)
    for row, client_weights in zip(shares, weights, strict=True):
        if client_weights is not None:
            samples, experts = client_weights.shape
            row[:experts] = client_weights.argmax(dim=1).bincount(minlength=experts).double() / samples
    return shares
