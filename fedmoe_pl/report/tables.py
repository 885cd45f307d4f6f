"""The rows of a report's tables: a method's accuracies over clients and seeds, beside the paper's."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedmoe_pl.evaluation.evaluation import METRICS
from fedmoe_pl.logs.summary import on_test_samples
from fedmoe_pl.report.methods import settings_of_method
from fedmoe_pl.report.runs import Row, RunFiles
from fedmoe_pl.report.settings import Setting, brief, labels
from fedmoe_pl.report.statistics import Difference, Spread, over_seeds, paired_difference


class Table(NamedTuple):
    """A table: its header, and a name and cells for each row."""

    header: list[str]
    rows: list[tuple[str, list[str]]]


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
        return [self._result(run) for run in self.runs]

    def _result(self, run: RunFiles) -> Row:
        final = [row for row in run.summary if row["method"] == self.name]
        return (final or self.rounds(run))[-1]

    def rounds(self, run: RunFiles) -> list[Row]:
        """The evaluated rounds of a run, in order."""
        return [row for row in run.rounds if row["method"] == self.name]

    def over_seeds(self, column: str) -> Spread:
        """Mean and deviation over seeds of a column of the results."""
        return over_seeds([row.get(column, math.nan) for row in self.results])

    def of_clients(self, metric: str) -> list[float]:
        """The values of a metric of all clients of all runs that have one; accuracies as fractions."""
        rows = (row for run in self.runs for row in run.clients if row["method"] == self.name)
        return [row[metric] for row in rows if not math.isnan(row.get(metric, math.nan))]

    def published(self, metric: str) -> list[Published]:
        """The paper's numbers of a metric, from the runs' grid."""
        entries = [entry for entry in self.runs[0].cell.get("paper") or [] if entry["metric"] == metric]
        numbers = [(entry["table"], entry["cells"].get(self.name)) for entry in entries]
        return [Published(table, *cell) for table, cell in numbers if cell is not None]


class Published(NamedTuple):
    """A paper's number, in percent, with its standard deviation if the paper has one."""

    table: str
    mean: float
    std: float | None


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
    def metrics(self) -> list[str]:
        """The accuracies and other metrics on test samples that some method has."""
        runs = [run for setting in self.settings for run in setting.runs]
        names = dict.fromkeys(metric for run in runs for metric in run.metrics)
        return on_test_samples(sorted(names, key=[*METRICS, *names].index))

    def lower_is_better(self, metric: str) -> bool:
        """Whether a lower value is better: then the worst tenth has values above the mean."""
        rows = [row for method in self.methods for run in method.runs for row in method.rounds(run) + method.results]
        nan = math.nan
        return any(row.get(f"{metric}_worst_tenth", nan) > row.get(f"{metric}_mean", nan) for row in rows)

    @property
    def seeds(self) -> int:
        """The largest number of seeds of a method."""
        return max(len(method.runs) for method in self.methods)

    @property
    def data(self) -> str:
        """The data in words."""
        return _data(self.settings[0].values)


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


def _data(values: Mapping[str, Any]) -> str:
    """The data in words.

    Example:
        >>> _data({"data": "x.Digits", "data/num_clients": 5, "data/partitioner": "x.Dirichlet",
        ...     "data/partitioner/alpha": 0.5})
        'Digits, 5 clients, Dirichlet (alpha 0.5)'
    """
    if "data" not in values:
        return ""
    name = brief(values.get("data/path", values["data"]))
    clients = f", {values['data/num_clients']} clients" if "data/num_clients" in values else ""
    partitioner = values.get("data/partitioner")
    head = "data/partitioner/"
    arguments = ", ".join(f"{key.removeprefix(head)} {value}" for key, value in values.items() if key.startswith(head))
    of_partitioner = f", {brief(partitioner)}" if partitioner else ""
    return name + clients + of_partitioner + (f" ({arguments})" if arguments else "")


def difference(method: Method, baseline: Method, metric: str) -> Difference:
    """The difference of a method to a baseline, paired over the clients of the seeds that both have."""
    of_baseline = {run.seed: run for run in baseline.runs}
    both = [(run, of_baseline[run.seed]) for run in method.runs if run.seed in of_baseline]
    ours, theirs = (
        [
            {int(row["client"]): row.get(metric, math.nan) for row in run.clients if row["method"] == name}
            for run in runs
        ]
        for name, runs in ((method.name, [run for run, _ in both]), (baseline.name, [run for _, run in both]))
    )
    return paired_difference(ours, theirs)


def legend(methods: Iterable[Method]) -> dict[str, list[str]]:
    """What was evaluated, and the labels of the methods for which this was."""
    lines: dict[str, list[str]] = {}
    for method in methods:
        row = method.results[0]
        rounds = sorted({int(result["round"]) for result in method.results})
        numbers = f"round {rounds[0]}" if len(rounds) == 1 else f"rounds {rounds[0]} to {rounds[-1]}"
        clients = f"{row['clients']} clients" if row.get("clients") else ""
        state = "" if method.is_finished else ", not finished"
        text = f"{row.get('model')}, {row['moment']}, {row.get('selection')} ({numbers}{state}), {clients}"
        lines.setdefault(text.rstrip(", "), []).append(method.label)
    return lines
