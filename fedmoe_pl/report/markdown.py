"""A report's tables as Markdown, for a README or a page of results."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.logs.summary import axis_label
from fedmoe_pl.report.columns import Choices, Column, curve_table, main_columns
from fedmoe_pl.report.tables import Condition
from fedmoe_pl.report.text import evaluated, explanation, rounds_text, seeds_text, words


def markdown(conditions: Sequence[Condition], choices: Choices, origin: str, command: str) -> str:
    """One table per condition, with a row per method, what their numbers are, and how they were made.

    Args:
        conditions: the conditions.
        choices: what the user of the report chose.
        origin: when and where it was made.
        command: the command that made it.
    """
    of_models = [evaluated(condition) for condition in conditions]
    common = [line for line in of_models[0] if all(line in lines for lines in of_models)]
    parts, explained = list[str](), list[str]()
    for condition, lines in zip(conditions, of_models, strict=True):
        parts += _condition(condition, choices)
        parts += _bullets([line for line in lines if line not in common])
        explained += explanation(condition, choices.baseline_of(condition))
    below = _bullets([*dict.fromkeys(explained), *common])
    return "\n\n".join([*parts, *below, origin, f"```bash\n{command}\n```"]) + "\n"


def _bullets(lines: Sequence[str]) -> list[str]:
    wrapped = [textwrap.fill(f"* {line}.", 120, subsequent_indent="  ", break_long_words=False) for line in lines]
    return ["\n".join(wrapped)] if wrapped else []


def _condition(condition: Condition, choices: Choices) -> list[str]:
    title = [f"### {condition.name}"] if condition.name else []
    facts = [f"{fact}." for fact in (condition.data, seeds_text(condition)) if fact]
    parts = [*title, " ".join(facts), _methods(condition, choices)]
    if choices.rounds:
        metric = choices.metric_of(condition)
        curves = curve_table(condition, metric, choices.rounds)
        text = f"{axis_label(metric).capitalize()}, after some rounds:"
        parts += [text, table(curves.header, [[label, *cells] for label, cells in curves.rows])] if curves.rows else []
    return parts


def _methods(condition: Condition, choices: Choices) -> str:
    columns = [Column("method", [method.label for method in condition.methods])]
    if not all(method.is_finished for method in condition.methods):
        columns.append(Column("round", [rounds_text(method) for method in condition.methods]))
    for metric in condition.metrics:
        columns += main_columns(condition, metric, choices, words(metric))
    rows = zip(*(column.cells for column in columns), strict=True)
    return table([column.title for column in columns], rows)


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


def with_section(page: str, name: str, text: str) -> str:
    r"""A page of Markdown with a new text between the marks of a section.

    The text's headings become bold lines: what comes after the section would else belong to the last of them.

    Args:
        page: the page, which has the lines ``<!-- fedmoe report: NAME -->`` and ``<!-- end of NAME -->``.
        name: the section's name.
        text: the text that takes the place of what is between them.

    Raises:
        MisconfigurationException: if the page lacks one of the lines, or has it twice.

    Example:
        >>> page = "Digits\n<!-- fedmoe report: a -->\nold\n<!-- end of a -->\nagree.\n"
        >>> with_section(page, "a", "### new\n").splitlines()
        ['Digits', '<!-- fedmoe report: a -->', '', '**new**', '', '<!-- end of a -->', 'agree.']
    """
    marks = f"<!-- fedmoe report: {name} -->", f"<!-- end of {name} -->"
    before, *parts = page.split(marks[0])
    after = parts[0].split(marks[1]) if len(parts) == 1 else []
    if len(after) != 2:
        raise MisconfigurationException(
            f"report: --section is '{name}', but must be a section of the Markdown file, which must have the "
            f"lines {marks[0]} and {marks[1]} once."
        )
    text = re.sub("^#+ (.*)$", r"**\1**", text.strip(), flags=re.MULTILINE)
    return f"{before}{marks[0]}\n\n{text}\n\n{marks[1]}{after[1]}"
