"""The tables of a report: methods in rows, their metrics over clients and seeds in columns, beside the paper's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from fedmoe_pl.evaluation.results import ACCURACIES
from fedmoe_pl.logs.summary import change_text, description, having, on_test_samples, value_text
from fedmoe_pl.report.runs import Row, RunFiles
from fedmoe_pl.report.settings import Setting, brief, labels, settings_of
from fedmoe_pl.report.statistics import SIGNIFICANCE, Difference, OverSeeds, over_seeds, paired_difference

_INDEPENDENCE = (
    "Clients of one seed share a global model, a partition and the order of training, so only seeds are independent: a "
    "small p alone says that a difference holds in these runs. p is not corrected for the number of methods"
)
_MOST_CLIENTS = 50  # rows of a table of clients


class Table(NamedTuple):
    """A table of texts, whose rows begin with their names."""

    header: list[str]
    rows: list[list[str]]

    def markdown(self, best: str = "") -> str:
        r"""The table in Markdown, with aligned columns; the row with the name ``best`` is bold.

        Example:
            >>> print(Table(["method", "local test"], [["a|b", "90.00"]]).markdown())
            | method | local test |
            | ------ | ---------- |
            | a\|b   | 90.00      |
        """
        lines = [[*map(in_markdown, line)] for line in (self.header, *self.rows)]
        lines[1:] = [
            [f"**{cell}**" for cell in line] if best and row[0] == best else line
            for row, line in zip(self.rows, lines[1:], strict=True)
        ]
        widths = [max(3, *map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
        return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def in_markdown(text: str) -> str:
    r"""A text as Markdown that shows it as it is, whatever it has of links, HTML, mathematics or emphasis.

    Signs that mean nothing where they stand are left, such as the star behind a number.

    Example:
        >>> print(in_markdown("[a](javascript:b) <i> *c* $x$ top_p +1.23* 1\n2"))
        \[a](javascript:b) &lt;i> \*c* \$x\$ top_p +1.23* 1 2
    """
    text = re.sub(r"<(?=\S)", "&lt;", re.sub(r"&(?=[#\w])", "&amp;", one_line(text)))
    return re.sub(r"([\\`\[|~$]|\*(?=[^\s:])|(?<![^\W_])_(?=\S)|(?<!\S)(?:>|[#+*-](?=[#\s])))", r"\\\1", text)


def one_line(text: str) -> str:
    """A text without line breaks and other characters that cannot be seen."""
    return "".join(character if character.isprintable() else " " for character in text)


class Column(NamedTuple):
    """A column: its title, and a cell for each method."""

    title: str
    cells: list[str]


class PaperNumber(NamedTuple):
    """A paper's number, in percent, with its standard deviation if the paper has one."""

    table: str
    mean: float
    std: float | None


@dataclass(frozen=True, eq=False)
class Method:
    """A method under one setting: a row of a table."""

    label: str  # in tables and pictures
    name: str  # in the run's files
    runs: list[RunFiles]  # one for each seed, with the rows of the method
    is_finished: bool

    @property
    def results(self) -> list[Row]:
        """The row of ``summary.csv`` of each run; of an unfinished one the last row of ``rounds.csv``."""
        return [(run.summary or run.rounds)[-1] for run in self.runs]

    def over_seeds(self, column: str) -> OverSeeds:
        """Mean and deviation over seeds of a column of the results."""
        return over_seeds([row.get(column, math.nan) for row in self.results])

    def of_clients(self, metric: str) -> list[float]:
        """The values of a metric of all clients of all runs that have one; accuracies as fractions."""
        values = (row.get(metric, math.nan) for run in self.runs for row in run.clients)
        return [value for value in values if not math.isnan(value)]

    @property
    def failed(self) -> int:
        """How often clients failed or dropped out, in all rounds of all runs."""
        numbers = [run.rounds[-1].get("failed", math.nan) for run in self.runs if run.rounds]
        return int(sum(number for number in numbers if not math.isnan(number)))

    @property
    def rounds_text(self) -> str:
        """The rounds of the results, such as ``20``, ``11 to 14`` or ``12 so far``."""
        rounds = sorted({int(row["round"]) for row in self.results})
        text = f"{rounds[0]}" if len(rounds) == 1 else f"{rounds[0]} to {rounds[-1]}"
        return text if self.is_finished else f"{text} so far"

    def published(self, metric: str) -> list[PaperNumber]:
        """The paper's numbers of a metric, from the runs' grid."""
        entries = [entry for entry in self.runs[0].cell.get("paper") or [] if entry["metric"] == metric]
        numbers = [(entry["table"], entry["cells"].get(self.name)) for entry in entries]
        return [PaperNumber(table, *cell) for table, cell in numbers if cell is not None]


class Choices(NamedTuple):
    """What the user of a report chose; see the command's options."""

    metric: str | None = None
    target: float | None = None
    baseline: str | None = None
    rounds: Sequence[int] = ()


@dataclass(frozen=True, eq=False)
class Condition:
    """Methods that may be compared, because their data are the same: a table."""

    name: str  # the keys in which conditions differ, and their values; empty if there is only one
    settings: list[Setting]
    methods: list[Method]
    choices: Choices

    @property
    def runs(self) -> list[RunFiles]:
        """The runs of all settings."""
        return [run for setting in self.settings for run in setting.runs]

    @property
    def metrics(self) -> list[str]:
        """The accuracies and other metrics on test samples that some method has, and the chosen one."""
        names = dict.fromkeys(metric for run in self.runs for metric in run.metrics)
        shown = on_test_samples(sorted(names, key=[*ACCURACIES, *names].index))
        chosen = self.choices.metric
        return [*shown, chosen] if chosen in names and chosen not in shown else shown

    @property
    def metric(self) -> str:
        """The chosen metric, or the first if the condition does not have that one."""
        return self.choices.metric if self.choices.metric in self.metrics else self.metrics[0]

    @property
    def baseline(self) -> Method | None:
        """The method with which the others are compared."""
        name = self.choices.baseline or self.methods[0].runs[0].cell.get("baseline")
        return next((method for method in self.methods if name in (method.label, method.name)), None)

    def lower_is_better(self, metric: str) -> bool:
        """Whether a lower value is better, as the rows name it."""
        rows = (row for method in self.methods for run in method.runs for row in (*run.rounds, *run.summary))
        return any(metric in row.get("lower_is_better", "").split() for row in rows)

    @property
    def data(self) -> str:
        """The data in words."""
        return data_text(self.settings[0].values)

    @property
    def seeds_text(self) -> str:
        """How many seeds the methods have."""
        numbers = sorted({len(method.runs) for method in self.methods})
        if numbers == [1]:
            return "One run"
        return f"{numbers[-1]} seeds" if len(numbers) == 1 else f"{numbers[0]} to {numbers[-1]} seeds"


def condition_of(name: str, settings: Sequence[Setting], choices: Choices) -> Condition:
    """The methods of some settings; a method has a row for each setting in which what it depends on differs."""
    runs = [run for setting in settings for run in setting.runs]
    rows = list[Method]()
    for method in dict.fromkeys(method for run in runs for method in run.methods):
        having, _ = settings_of((run.of(method) for run in runs if method in run.methods), method)
        for label, setting in zip(labels(method, having), having, strict=True):
            done = [run for run in setting.runs if run.summary]
            rows.append(Method(one_line(label), method, done or setting.runs, bool(done)))
    return Condition(name, [*settings], rows, choices)


def difference(method: Method, baseline: Method, metric: str) -> Difference:
    """The difference of two methods, paired over the clients of the seeds that both have."""
    of_baseline = {run.seeds: run for run in baseline.runs}
    both = [(run, of_baseline[run.seeds]) for run in method.runs if run.seeds in of_baseline]

    def values(run: RunFiles) -> dict[int, float]:
        return {int(row["client"]): row.get(metric, math.nan) for row in run.clients}

    return paired_difference([values(run) for run, _ in both], [values(run) for _, run in both])


def main_columns(condition: Condition, metric: str, mean: str) -> list[Column]:
    """A metric's mean, under the title ``mean``, with its deviation over seeds, the paper's number, the difference."""
    methods, baseline = condition.methods, condition.baseline
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


def methods_table(condition: Condition) -> Table:
    """The methods and their metrics; where a method is not finished, also its round."""
    columns = [Column("method", [method.label for method in condition.methods])]
    if not all(method.is_finished for method in condition.methods):
        columns.append(Column("round", [method.rounds_text for method in condition.methods]))
    for metric in condition.metrics:
        columns += main_columns(condition, metric, words(metric))
    return Table([c.title for c in columns], [[*row] for row in zip(*(c.cells for c in columns), strict=True)])


def clients_table(condition: Condition) -> Table | None:
    """The metric of each client by method, means over seeds; None if the data have no names or very many clients."""
    metric, methods = condition.metric, condition.methods
    names = {row["client"]: row["name"] for run in condition.runs for row in run.clients if row.get("name")}
    if not 0 < len(names) <= _MOST_CLIENTS:
        return None

    def cell(method: Method, client: float) -> str:
        rows = [row for run in method.runs for row in run.clients if row["client"] == client]
        return value_text(metric, over_seeds([row.get(metric, math.nan) for row in rows]).mean if rows else math.nan)

    rows = [[names[client], *(cell(method, client) for method in methods)] for client in sorted(names)]
    return Table(["client", *(method.label for method in methods)], rows)


def curve_table(condition: Condition) -> Table:
    """The metric after chosen rounds, a dash for those not evaluated; only of methods that have one of them."""
    metric, rounds = condition.metric, condition.choices.rounds
    rows = [[method.label, *(_at_round(method, metric, round) for round in rounds)] for method in condition.methods]
    return Table(["method", *(f"round {round}" for round in rounds)], [row for row in rows if {*row[1:]} != {"-"}])


def _at_round(method: Method, metric: str, round: int) -> str:
    rows = [row for run in method.runs for row in run.rounds if row["round"] == round]
    values = [row.get(f"{metric}_mean", math.nan) for row in rows]
    if len(values) < len(method.runs) or any(math.isnan(value) for value in values):
        return "-"
    return over_seeds_text(metric, over_seeds(values))


def words(metric: str) -> str:
    """The name of a metric in words."""
    return metric.replace("_", " ")


def over_seeds_text(metric: str, spread: OverSeeds) -> str:
    """A metric, an accuracy in percent, with its deviation over seeds if there are several."""
    return value_text(metric, spread.mean) + ("" if math.isnan(spread.std) else f" ± {value_text(metric, spread.std)}")


def published_text(cells: Sequence[PaperNumber]) -> str:
    """A paper's number; a dash if it has none."""
    return " / ".join(f"{c.mean:.2f}" + ("" if c.std is None else f" ± {c.std:.2f}") for c in cells) or "-"


def difference_text(metric: str, difference: Difference | None) -> str:
    """A difference, of accuracies in points, with a star if it is more than noise; a dash for none.

    Example:
        >>> difference_text("local_test", Difference(0.0123, 0.001, 60, True)), difference_text("local_test", None)
        ('+1.23*', '-')
    """
    if difference is None or math.isnan(difference.mean):
        return "-"
    change = change_text(metric, difference.mean)
    change = "+0.00" if change == "-0.00" else change
    return f"{change}{'*' if difference.is_more_than_noise else ''}"


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


def meaning(condition: Condition) -> str:
    """What the means and deviations are over, without a final full stop."""
    what = "Accuracy in percent, mean" if any(metric in ACCURACIES for metric in condition.metrics) else "Mean"
    several = max(len(method.runs) for method in condition.methods) > 1
    return f"{what} over the clients{'; ± is the sample standard deviation over seeds' if several else ''}"


def explanation(condition: Condition) -> list[str]:
    """What the numbers are, in phrases without a final full stop."""
    baseline = condition.baseline
    lines = [meaning(condition)]
    for name in condition.metrics:
        lines.append(f"{words(name)}: {description(name, condition.lower_is_better(name))}{_having(condition, name)}")
    cells = (cell for method in condition.methods for metric in condition.metrics for cell in method.published(metric))
    lines += [f"Paper: {table}" for table in dict.fromkeys(cell.table for cell in cells)]
    if baseline is not None:
        has_points = [metric in ACCURACIES for metric in condition.metrics]
        unit = " in points" if all(has_points) else ", of accuracies in points" if any(has_points) else ""
        lines.append(
            f"to {baseline.label}: difference{unit}; *: p < {SIGNIFICANCE} in a Wilcoxon signed-rank test over the "
            "clients of all seeds, and the same sign in every seed of at least two"
        )
        lines.append(_INDEPENDENCE)
    lines += failures(condition)
    if len({run.seeds for run in condition.runs}) > len({run.seeds[1] for run in condition.runs}) == 1:
        lines.append("All seeds have the same partition (data.init_args.partition_seed)")
    return lines


def failures(condition: Condition) -> list[str]:
    """How often clients failed, and what their numbers are then, in a phrase without a final full stop; none if not."""
    failed = [f"{method.label} {method.failed}" for method in condition.methods if method.failed]
    text = f"Clients that failed or dropped out, counted over all rounds: {', '.join(failed)}"
    return [f"{text}; one that never trained is evaluated with the model that it began with"] if failed else []


def _having(condition: Condition, metric: str) -> str:
    """How many clients have a metric, if some have none, such as those without held-out samples."""
    several = max(len(method.runs) for method in condition.methods) > 1
    counts = [
        (method.label, len(method.of_clients(metric)), sum(len(run.clients) for run in method.runs))
        for method in condition.methods
    ]
    return having(counts, " of all seeds" if several else "")


def evaluated(methods: Iterable[Method]) -> list[str]:
    """What was evaluated of each method, in phrases without a final full stop."""
    lines: dict[str, list[str]] = {}
    for method in methods:
        row = method.results[0]
        rounds = method.rounds_text.removesuffix(" so far")
        numbers = f"{'rounds' if ' ' in rounds else 'round'} {rounds}{'' if method.is_finished else ', not finished'}"
        clients = f", {row['clients']} clients" if row.get("clients") else ""
        text = f"{row.get('model')}, {row['evaluation_point']}, {row.get('selection')} ({numbers}){clients}"
        lines.setdefault(text, []).append(method.label)
    return [f"{', '.join(names)}: {text}" for text, names in lines.items()]
