"""The tables of a report: methods in rows, their metrics over clients and seeds in columns, beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedmoe_pl.evaluation.evaluation import METRICS
from fedmoe_pl.logs.summary import change_text, description, on_test_samples, value_text
from fedmoe_pl.report.runs import Row, RunFiles
from fedmoe_pl.report.settings import Setting, brief, labels, settings_of_method
from fedmoe_pl.report.statistics import (
    INDEPENDENCE,
    SIGNIFICANCE,
    Difference,
    Spread,
    over_seeds,
    paired_difference,
)


class Table(NamedTuple):
    """A table: its header, and a name and cells for each row."""

    header: list[str]
    rows: list[tuple[str, list[str]]]


class Column(NamedTuple):
    """A column: its title, and a cell for each method."""

    title: str
    cells: list[str]


class Published(NamedTuple):
    """A paper's number, in percent, with its standard deviation if the paper has one."""

    table: str
    mean: float
    std: float | None


@dataclass(frozen=True, eq=False)
class Method:
    """A method under one setting: a row of a table.

    Attributes:
        label: its name in tables and pictures.
        name: its name in the run's files.
        runs: the runs that have it, one for each seed.
        is_finished: whether all of them have its result.
    """

    label: str
    name: str
    runs: list[RunFiles]
    is_finished: bool

    @property
    def results(self) -> list[Row]:
        """The row of ``summary.csv`` of each run; of an unfinished one the last row of ``rounds.csv``."""
        final = ([row for row in run.summary if row["method"] == self.name] for run in self.runs)
        return [(rows or self.rounds(run))[-1] for rows, run in zip(final, self.runs, strict=True)]

    def rounds(self, run: RunFiles) -> list[Row]:
        """The evaluated rounds of a run, in order."""
        return [row for row in run.rounds if row["method"] == self.name]

    def clients(self, run: RunFiles) -> list[Row]:
        """The rows of ``clients.csv`` of a run."""
        return [row for row in run.clients if row["method"] == self.name]

    def over_seeds(self, column: str) -> Spread:
        """Mean and deviation over seeds of a column of the results."""
        return over_seeds([row.get(column, math.nan) for row in self.results])

    def of_clients(self, metric: str) -> list[float]:
        """The values of a metric of all clients of all runs that have one; accuracies as fractions."""
        values = (row.get(metric, math.nan) for run in self.runs for row in self.clients(run))
        return [value for value in values if not math.isnan(value)]

    def published(self, metric: str) -> list[Published]:
        """The paper's numbers of a metric, from the runs' grid."""
        entries = [entry for entry in self.runs[0].cell.get("paper") or [] if entry["metric"] == metric]
        numbers = [(entry["table"], entry["cells"].get(self.name)) for entry in entries]
        return [Published(table, *cell) for table, cell in numbers if cell is not None]


@dataclass(frozen=True, eq=False)
class Condition:
    """Methods that may be compared, because their data are the same: a table.

    Attributes:
        name: the keys in which conditions differ, and their values; empty if there is only one condition.
        settings: the settings.
        methods: the rows.
    """

    name: str
    settings: list[Setting]
    methods: list[Method]

    @property
    def runs(self) -> list[RunFiles]:
        """The runs of all settings."""
        return [run for setting in self.settings for run in setting.runs]

    @property
    def metrics(self) -> list[str]:
        """The accuracies and other metrics on test samples that some method has."""
        names = dict.fromkeys(metric for run in self.runs for metric in run.metrics)
        return on_test_samples(sorted(names, key=[*METRICS, *names].index))

    def lower_is_better(self, metric: str) -> bool:
        """Whether a lower value is better: then the worst tenth has values above the mean."""
        rows = [row for method in self.methods for run in method.runs for row in method.rounds(run) + method.results]
        nan = math.nan
        return any(row.get(f"{metric}_worst_tenth", nan) > row.get(f"{metric}_mean", nan) for row in rows)

    @property
    def data(self) -> str:
        """The data in words."""
        return data_text(self.settings[0].values)


class Choices(NamedTuple):
    """What the user of a report chose.

    Attributes:
        metric: the accuracy whose cost is compared, and which is listed by rounds; None for each condition's first.
        target: the value of it to reach, of an accuracy a fraction; None for what half of the methods reach.
        baseline: the method with which the others are compared; None for that of the runs' grid, if it has one.
        rounds: the rounds that a table lists.
    """

    metric: str | None = None
    target: float | None = None
    baseline: str | None = None
    rounds: Sequence[int] = ()

    def metric_of(self, condition: Condition) -> str:
        """The chosen metric, or the condition's first if it does not have that one."""
        return self.metric if self.metric in condition.metrics else condition.metrics[0]

    def baseline_of(self, condition: Condition) -> Method | None:
        """The method with which a condition's others are compared."""
        name = self.baseline or condition.methods[0].runs[0].cell.get("baseline")
        return next((method for method in condition.methods if name in (method.label, method.name)), None)


def condition_of(name: str, settings: Sequence[Setting]) -> Condition:
    """The methods of some settings, in the order of the settings; one row for those in which a method is the same."""
    methods: dict[str, list[Setting]] = {}
    for setting in settings:
        for method in setting.methods:
            methods.setdefault(method, []).append(setting)
    joined = {method: settings_of_method(method, having) for method, having in methods.items()}
    rows = [
        _method(label, method, setting)
        for method, having in joined.items()
        for label, setting in zip(labels(method, having), having, strict=True)
    ]
    return Condition(name, [*settings], rows)


def _method(label: str, name: str, setting: Setting) -> Method:
    runs = [run for run in setting.runs if name in run.methods]
    done = [run for run in runs if any(row["method"] == name for row in run.summary)]
    return Method(label, name, done or runs, bool(done))


def difference(method: Method, baseline: Method, metric: str) -> Difference:
    """The difference of a method to a baseline, paired over the clients of the seeds that both have."""
    of_baseline = {run.seed: run for run in baseline.runs}
    both = [(run, of_baseline[run.seed]) for run in method.runs if run.seed in of_baseline]

    def values(of: Method, run: RunFiles) -> dict[int, float]:
        return {int(row["client"]): row.get(metric, math.nan) for row in of.clients(run)}

    return paired_difference([values(method, run) for run, _ in both], [values(baseline, run) for _, run in both])


def main_columns(condition: Condition, metric: str, choices: Choices, mean: str) -> list[Column]:
    """A metric's mean, under the title ``mean``, and deviation over seeds, the paper's number, and the difference."""
    methods, baseline = condition.methods, choices.baseline_of(condition)
    columns = [Column(mean, [over_seeds_text(metric, method.over_seeds(f"{metric}_mean")) for method in methods])]
    published = [published_text(method.published(metric)) for method in methods]
    if {*published} != {"-"}:
        columns.append(Column("paper", published))
    if baseline is not None:
        found = [None if method is baseline else difference(method, baseline, metric) for method in methods]
        columns.append(Column(f"to {baseline.label}", [difference_text(metric, each) for each in found]))
    return columns


def client_columns(condition: Condition, metric: str) -> list[Column]:
    """A metric's deviation over the clients and the mean of the worst tenth, both as means over seeds."""
    spreads = {"± over clients": "std", "worst tenth": "worst_tenth"}
    return [
        Column(title, [value_text(metric, method.over_seeds(f"{metric}_{name}").mean) for method in condition.methods])
        for title, name in spreads.items()
    ]


def curve_table(condition: Condition, metric: str, rounds: Sequence[int]) -> Table:
    """A metric after some rounds, mean and deviation over seeds; a dash for rounds that were not evaluated.

    Methods that were evaluated in none of them are left out.
    """
    rows = [(method.label, [_at_round(method, metric, round) for round in rounds]) for method in condition.methods]
    rows = [(label, cells) for label, cells in rows if {*cells} != {"-"}]
    return Table(["method", *(f"round {round}" for round in rounds)], rows)


def _at_round(method: Method, metric: str, round: int) -> str:
    rows = [row for run in method.runs for row in method.rounds(run) if row["round"] == round]
    values = [row.get(f"{metric}_mean", math.nan) for row in rows]
    if len(values) < len(method.runs) or any(math.isnan(value) for value in values):
        return "-"
    return over_seeds_text(metric, over_seeds(values))


def words(metric: str) -> str:
    """The name of a metric in words."""
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


def data_text(values: Mapping[str, Any]) -> str:
    """The data in words.

    Example:
        >>> data_text({"data": "x.Digits", "data/num_clients": 5, "data/partitioner": "x.Dirichlet",
        ...     "data/partitioner/alpha": 0.5})
        'Digits, 5 clients, Dirichlet (alpha 0.5)'
    """
    if "data" not in values:
        return ""
    clients = f", {values['data/num_clients']} clients" if "data/num_clients" in values else ""
    partitioner = f", {brief(values['data/partitioner'])}" if values.get("data/partitioner") else ""
    head = "data/partitioner/"
    arguments = ", ".join(f"{key.removeprefix(head)} {value}" for key, value in values.items() if key.startswith(head))
    name = brief(values.get("data/path", values["data"]))
    return name + clients + partitioner + (f" ({arguments})" if arguments else "")


def explanation(condition: Condition, baseline: Method | None) -> list[str]:
    """What the numbers are, in phrases without a final full stop."""
    seeds = "; ± is the sample standard deviation over seeds"
    what = "Accuracy in percent, mean" if any(metric in METRICS for metric in condition.metrics) else "Mean"
    several = max(len(method.runs) for method in condition.methods) > 1
    lines = [f"{what} over the clients{seeds if several else ''}"]
    lines += [f"{words(metric)}: {description(metric)}" for metric in condition.metrics]
    cells = (cell for method in condition.methods for metric in condition.metrics for cell in method.published(metric))
    lines += [f"Paper: {table}" for table in dict.fromkeys(cell.table for cell in cells)]
    if baseline is not None:
        lines.append(
            f"to {baseline.label}: difference in points; *: p < {SIGNIFICANCE} in a Wilcoxon signed-rank test over the "
            "clients of all seeds, and the same sign in every seed of at least two"
        )
        lines.append(INDEPENDENCE.rstrip("."))
    return lines


def evaluated(methods: Iterable[Method]) -> list[str]:
    """What was evaluated of each method, in phrases without a final full stop."""
    lines: dict[str, list[str]] = {}
    for method in methods:
        row = method.results[0]
        rounds = rounds_text(method).removesuffix(" so far")
        numbers = f"{'rounds' if ' ' in rounds else 'round'} {rounds}{'' if method.is_finished else ', not finished'}"
        clients = f", {row['clients']} clients" if row.get("clients") else ""
        text = f"{row.get('model')}, {row['evaluation_point']}, {row.get('selection')} ({numbers}){clients}"
        lines.setdefault(text, []).append(method.label)
    return [f"{', '.join(names)}: {text}" for text, names in lines.items()]
