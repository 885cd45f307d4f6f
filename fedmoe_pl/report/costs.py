"""What each method spent until it first reached a target accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fedmoe_pl.callbacks.cost_to_target import between, target_rows
from fedmoe_pl.checkpoints.phase_state import WAYS
from fedmoe_pl.evaluation.results import ACCURACIES
from fedmoe_pl.logs.summary import value_text
from fedmoe_pl.report.runs import RunFiles
from fedmoe_pl.report.tables import Condition, Method, Table, words

_COLUMNS = {"flops", *(f"{name}_before" for name in ("rounds", "parameters", "bytes", "flops"))}
_COLUMNS |= {f"{name}_{way}" for name in ("parameters", "bytes") for way in WAYS}


class Cost(NamedTuple):
    """A method's costs, as means over the ``reached`` of its ``seeds`` that reached the target; nan if none did."""

    label: str
    reached: int
    seeds: int
    earliest: float  # round after the evaluation before
    rounds: float
    bytes: float
    flops: float
    best: float  # of all evaluated rounds, a mean over all seeds


def cost_table(condition: Condition, metric: str, target: float) -> Table:
    """The costs of the methods until the clients' mean reached the target."""
    rows = list[list[str]]()
    for cost in costs(condition, metric, target):
        rounds = "-" if math.isnan(cost.rounds) else between(cost.earliest, cost.rounds, "{:.4g}".format)
        rounds += f" ({cost.reached} of {cost.seeds} seeds)" if 0 < cost.reached < cost.seeds else ""
        amounts = amount(cost.bytes, "B"), amount(cost.flops, "FLOP")
        rows.append([cost.label, rounds, *amounts, value_text(metric, cost.best)])
    return Table(["method", "rounds", "sent", "local training", "best of all rounds"], rows)


def cost_text(condition: Condition, target: float) -> str:
    """What the numbers of the table are."""
    metric = condition.metric
    reached = value_text(metric, target) + (" percent" if metric in ACCURACIES else "")
    several = max(len(method.runs) for method in condition.methods) > 1
    return (
        f"Until the mean {words(metric)} over the clients first reached {reached} in an evaluated round: rounds (11 to "
        "20 if the rounds 10 and 20 were evaluated, and none between them; a dash if none of the evaluated rounds "
        "reached it, or if a checkpoint gave a result, whose costs are unknown), everything sent by or to any client, "
        "and all local training. Both are counted up to the last of these rounds, with all rounds of the phases that "
        "a method starts from"
        f"{'. Means over the seeds that reached it' if several else ''}."
    )


def costs(condition: Condition, metric: str, target: float) -> list[Cost]:
    """The costs of the methods whose runs counted what was sent and computed."""
    lower_is_better = condition.lower_is_better(metric)
    methods = (method for method in condition.methods if all(map(has_costs, method.runs)))
    return [_cost(method, metric, target, lower_is_better) for method in methods]


def has_costs(run: RunFiles) -> bool:
    """Whether a run counted what was sent and computed."""
    return bool(run.rounds) and run.rounds[0].keys() >= _COLUMNS


def _cost(method: Method, metric: str, target: float, lower_is_better: bool) -> Cost:
    rows = [target_rows(run.rounds, metric, target, lower_is_better)[0] for run in method.runs]
    reached = [row for row in rows if not math.isnan(row["rounds"])]
    earliest, rounds, sent, flops = (
        _mean([row[name] for row in reached]) for name in ("earliest_rounds", "rounds", "bytes", "flops")
    )
    best = _mean([row["best"] for row in rows])
    return Cost(method.label, len(reached), len(rows), earliest, rounds, sent, flops, best)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def default_target(condition: Condition, metric: str) -> float:
    """What at least half of the methods reach: of accuracies the highest whole percent, as a fraction.

    Other metrics are rounded to two digits, such that the value reaches the result. nan if there is none.
    """
    lower = condition.lower_is_better(metric)
    bests = sorted((cost.best for cost in costs(condition, metric, 1.0) if not math.isnan(cost.best)), reverse=lower)
    middle = bests[len(bests) // 2] if bests else math.nan
    if metric in ACCURACIES:
        return math.nan if math.isnan(middle) or middle < 0.01 else math.floor(100 * middle + 1e-6) / 100
    if not middle or not math.isfinite(middle):
        return middle if middle == 0 else math.nan
    unit = 10.0 ** (math.floor(math.log10(abs(middle))) - 1)
    return float(f"{(math.ceil if lower else math.floor)(middle / unit) * unit:.2g}")


def amount(value: float, unit: str) -> str:
    """A large number with three digits and a decimal prefix; a dash for nan.

    Example:
        >>> amount(351_415_200, "B"), amount(4.3e12, "FLOP"), amount(12, "B"), amount(float("nan"), "B")
        ('351 MB', '4.30 TFLOP', '12 B', '-')
    """
    if math.isnan(value):
        return "-"
    for prefix, size in (("E", 1e18), ("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            scaled = value / size
            return f"{scaled:.{max(0, 3 - len(str(int(scaled))))}f} {prefix}{unit}"
    return f"{value:.0f} {unit}"
