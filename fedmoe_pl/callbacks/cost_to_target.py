"""What each method spent to reach an accuracy, as in pFedMoE's comparison of costs (Yi et al. 2024)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedmoe_pl.checkpoints.phase_state import WAYS
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.evaluation.metrics import lower_is_better
from fedmoe_pl.evaluation.results import ACCURACIES, Evaluation
from fedmoe_pl.logs.summary import value_text, write_csv
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run
from fedmoe_pl.setup.data import check_direction, check_metric

_ROUNDING = 1e-9  # of a mean over clients


class CostToTarget(FederationCallback):
    """Writes ``target.csv``: rounds, parameters, bytes and operations until the clients' mean first reached a target.

    Parameters and bytes count everything that was sent by or to any client, operations (FLOPs) all local training. All
    rounds of the phases that a method starts from are counted, too. Only evaluated rounds can reach the target: it was
    reached between the evaluation before, from the round ``earliest_rounds`` on, and ``rounds``. These columns are
    empty if none did, or if a checkpoint gave a result, whose costs are unknown; the best value of all evaluated rounds
    and its round are always there.

    Args:
        target: the value to reach: of an accuracy, a fraction above 0 and at most 1.
        metric: the accuracy: ``local_test``, ``reweighted_test``, ``global_test`` or ``validation``, or a metric of
            the federation, such as ``local_test_rmse``.

    Raises:
        MisconfigurationException: if the target is out of range, or no client has the metric, or it does not say
            whether a higher value is better (``higher_is_better``).
    """

    def __init__(self, target: float, metric: str = "local_test") -> None:
        if metric in ACCURACIES and not 0 < target <= 1:
            raise InvalidArgumentError(self, "target", target, "a fraction above 0 and at most 1")
        self.target = target
        self.metric = metric

    def on_fit_start(self, run: Run) -> None:
        """Refuses a metric that no client has, or that does not say whether a higher value is better."""
        check_metric(self, "metric", self.metric, run.datamodule, run.metrics, run.models.values())
        check_direction(self, "metric", self.metric, run.metrics)

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Writes the rows of all methods so far."""
        if rows := self._rows(run):
            write_csv(run.folder / "target.csv", rows)

    def on_fit_end(self, run: Run) -> None:
        """Prints the rows."""
        if rows := self._rows(run):
            print(f"\n{_table(rows)}", flush=True)

    def _rows(self, run: Run) -> list[dict[str, Any]]:
        return target_rows(run.rows, self.metric, self.target, self.metric in lower_is_better(run.metrics))


def target_rows(
    rounds: Iterable[Mapping[str, Any]], metric: str, target: float, lower_is_better: bool = False
) -> list[dict[str, Any]]:
    """The rows of ``target.csv``, one for each method."""
    methods: dict[str, list[Mapping[str, Any]]] = {}
    for row in rounds:
        methods.setdefault(row["method"], []).append(row)
    sign = -1 if lower_is_better else 1
    return [_target_row(method, rows, metric, target, sign) for method, rows in methods.items()]


def _target_row(method: str, rounds: list[Mapping[str, Any]], metric: str, target: float, sign: int) -> dict[str, Any]:
    column = f"{metric}_mean"
    columns: dict[str, Any] = {"method": method, "evaluation_point": rounds[0]["evaluation_point"]}
    columns |= {"metric": metric, "target": target}
    measured = [row for row in rounds if not math.isnan(row.get(column, math.nan))]  # a method may lack the metric
    reached = next((row for row in measured if sign * (row[column] - target) >= -_ROUNDING), None)
    if reached is None:
        columns |= dict.fromkeys(("earliest_rounds", "rounds", "parameters", "bytes", "flops"), math.nan)
    else:
        before = [row["round"] for row in measured if row["round"] < reached["round"]]
        earliest = min(max(before, default=0) + 1, reached["round"]) + reached["rounds_before"]
        columns |= {"earliest_rounds": earliest, **spent(reached)}
    best = max(measured, key=lambda row: sign * row[column], default={column: math.nan, "round": math.nan})
    return columns | {"best": best[column], "best_round": best["round"]}


def spent(row: Mapping[str, Any]) -> dict[str, float]:
    """What a method has cost until a row of ``rounds.csv``, with all rounds of the phases that it starts from."""
    own = {"rounds": row["round"]}
    own |= {name: sum(row[f"{name}_{way}"] for way in WAYS) for name in ("parameters", "bytes")}
    own["flops"] = row["flops"]
    return {name: value + row[f"{name}_before"] for name, value in own.items()}


def between(earliest: float, latest: float, text: Callable[[float], str]) -> str:
    """The rounds of the evaluations between which a target was reached, such as ``11 to 20``; ``20`` if it is one."""
    return text(latest) if earliest == latest or math.isnan(latest) else f"{text(earliest)} to {text(latest)}"


def _table(rows: list[dict[str, Any]]) -> str:
    width = max(len("method"), *(len(row["method"]) for row in rows))
    columns = "".join(f"   {name:>10}" for name in ("rounds", "parameters", "bytes", "FLOPs", "best", "in round"))
    metric, target = rows[0]["metric"], rows[0]["target"]
    percents = " percent" if metric in ACCURACIES else ""
    of = f"{metric.replace('_', ' ')} of {value_text(metric, target)}{percents}, and the best of all rounds:"
    lines = [f"Cost until the mean over the clients first reached a {of}", f"{'method':<{width}}{columns}   evaluated"]
    for row in rows:
        costs = f"   {between(row['earliest_rounds'], row['rounds'], _number):>10}"
        costs += "".join(f"   {_number(row[name]):>10}" for name in ("parameters", "bytes", "flops"))
        best = f"{value_text(metric, row['best']):>10}   {_number(row['best_round']):>10}"
        lines.append(f"{row['method']:<{width}}{costs}   {best}   {row['evaluation_point']}")
    return "\n".join(lines)


def _number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return str(value) if value < 1e6 else f"{value:.3e}"
