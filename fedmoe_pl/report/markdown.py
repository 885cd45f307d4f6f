"""A report's tables as Markdown, for a README or a page of results."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedmoe_pl.report.tables import Condition, legend
from fedmoe_pl.report.text import (
    has_published,
    meaning,
    over_seeds_text,
    published_tables,
    published_text,
    rounds_text,
    seeds_text,
    words,
)


def markdown(conditions: Iterable[Condition], origin: str, command: str) -> str:
    """One table per condition, with a row per method, and how it was made.

    Args:
        conditions: the conditions.
        origin: when and where it was made.
        command: the command that made it.
    """
    parts = [part for condition in conditions for part in _condition(condition)]
    return "\n\n".join([*parts, origin, f"```bash\n{command}\n```"]) + "\n"


def _condition(condition: Condition) -> list[str]:
    title = [f"### {condition.name}"] if condition.name else []
    facts = ". ".join(f"{fact[0].upper()}{fact[1:]}" for fact in (condition.data, seeds_text(condition)) if fact)
    over_seeds = " ± sample standard deviation over seeds" if condition.seeds > 1 else ""
    papers = "".join(f" Paper: {table}." for table in published_tables(condition))
    text = f"{facts}. Percent, mean over the clients{over_seeds}.{papers}"
    evaluated = [f"- {', '.join(names)}: {line}" for line, names in legend(condition.methods).items()]
    lines = [*(f"- {line}" for line in meaning(condition.metrics)), *evaluated]
    return [*title, text, table(*_accuracies(condition)), "\n".join(lines)]


def _accuracies(condition: Condition) -> tuple[list[str], list[list[str]]]:
    header, rows = ["method"], [[method.label] for method in condition.methods]
    if not all(method.is_finished for method in condition.methods):
        header.append("round")
        for row, method in zip(rows, condition.methods, strict=True):
            row.append(rounds_text(method))
    for metric in condition.metrics:
        header.append(words(metric))
        header += ["paper"] if has_published(condition, metric) else []
        for row, method in zip(rows, condition.methods, strict=True):
            row.append(over_seeds_text(method.over_seeds(f"{metric}_mean")))
            row += [published_text(method.published(metric))] if has_published(condition, metric) else []
    return header, rows


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    r"""A table in Markdown.

    Example:
        >>> print(table(["method", "local test"], [["a|b", "90.00"]]))
        | method | local test |
        | --- | --- |
        | a\|b | 90.00 |
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)
