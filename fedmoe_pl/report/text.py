"""Numbers and names as text, the same on the page and in Markdown."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fedmoe_pl.evaluation.evaluation import METRICS
from fedmoe_pl.logs.summary import change_text, description, value_text
from fedmoe_pl.report.costs import Cost, amount
from fedmoe_pl.report.runs import RunFiles
from fedmoe_pl.report.statistics import INDEPENDENCE, SIGNIFICANCE, Difference, Spread
from fedmoe_pl.report.tables import Condition, Method, Published, legend


def words(metric: str) -> str:
    """The name of a metric in words.

    Example:
        >>> words("global_test_rmse")
        'global test rmse'
    """
    return metric.replace("_", " ")


def over_seeds_text(metric: str, spread: Spread) -> str:
    """A metric, an accuracy in percent, with its deviation over seeds if there are several.

    Example:
        >>> over_seeds_text("local_test", Spread(0.9, 0.0125, 3)), over_seeds_text("test_f1", Spread(0.9, math.nan, 1))
        ('90.00 ± 1.25', '0.9')
    """
    return value_text(metric, spread.mean) + ("" if math.isnan(spread.std) else f" ± {value_text(metric, spread.std)}")


def published_text(cells: Sequence[Published]) -> str:
    """A paper's number; a dash if it has none.

    Example:
        >>> published_text([Published("Table 2", 90.76, 0.82)]), published_text([])
        ('90.76 ± 0.82', '-')
    """
    return " / ".join(f"{c.mean:.2f}" + ("" if c.std is None else f" ± {c.std:.2f}") for c in cells) or "-"


def published_tables(condition: Condition) -> list[str]:
    """The tables of papers whose numbers are beside ours."""
    cells = (cell for method in condition.methods for metric in condition.metrics for cell in method.published(metric))
    return list(dict.fromkeys(cell.table for cell in cells))


def has_published(condition: Condition, metric: str) -> bool:
    """Whether a paper has numbers of the metric."""
    return any(method.published(metric) for method in condition.methods)


def difference_text(metric: str, difference: Difference | None) -> str:
    """A difference, of accuracies in points, with a star if it is more than noise; a dash for none.

    Example:
        >>> difference_text("local_test", Difference(0.0123, 0.001, 60, 3, True)), difference_text("local_test", None)
        ('+1.23*', '-')
    """
    if difference is None or math.isnan(difference.mean):
        return "-"
    change = change_text(metric, difference.mean)
    change = "+0.00" if change == "-0.00" else change
    return f"{change}{'*' if difference.is_more_than_noise else ''}"


def run_text(run: RunFiles) -> str:
    """A run's name and seed."""
    return run.name if run.seed is None else f"{run.name}, seed {run.seed}"


def rounds_text(method: Method) -> str:
    """The rounds of the results, such as ``20``, ``11 to 14`` or ``12 so far``."""
    rounds = sorted({int(row["round"]) for row in method.results})
    text = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
    return text if method.is_finished else f"{text} so far"


def seeds_text(condition: Condition) -> str:
    """How many seeds the methods have."""
    numbers = sorted({len(method.runs) for method in condition.methods})
    if numbers == [1]:
        return "One run"
    return f"{numbers[-1]} seeds" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} seeds"


def explanation(condition: Condition, baseline: Method | None) -> list[str]:
    """What the numbers are, in phrases without a final full stop."""
    seeds = "; ± is the sample standard deviation over seeds" if condition.seeds > 1 else ""
    what = "Accuracy in percent, mean" if any(metric in METRICS for metric in condition.metrics) else "Mean"
    lines = [f"{what} over the clients{seeds}", *meaning(condition.metrics)]
    lines += [f"Paper: {table}" for table in published_tables(condition)]
    if baseline is not None:
        lines.append(
            f"to {baseline.label}: difference in points; *: p < {SIGNIFICANCE} in a Wilcoxon signed-rank test over the "
            "clients of all seeds, and the same sign in every seed of at least two"
        )
        lines.append(INDEPENDENCE.rstrip("."))
    return lines


def evaluated(condition: Condition) -> list[str]:
    """What was evaluated of each method, in phrases without a final full stop."""
    return [f"{', '.join(names)}: {text}" for text, names in legend(condition.methods).items()]


def meaning(metrics: Iterable[str]) -> list[str]:
    """What each accuracy or other metric means."""
    return [f"{words(metric)}: {description(metric)}" for metric in metrics]


def cost_cells(metric: str, cost: Cost) -> list[str]:
    """A row of the table of costs: rounds, bytes, FLOPs, the metric's best value."""
    rounds = "-" if math.isnan(cost.rounds) else f"{cost.rounds:.4g}"
    if 0 < cost.reached < cost.seeds:
        rounds += f" ({cost.reached} of {cost.seeds} seeds)"
    return [rounds, amount(cost.bytes, "B"), amount(cost.flops, "FLOP"), value_text(metric, cost.best)]
