"""A report's tables as Markdown, for a README or a page of results."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.logs.summary import axis_label
from fedmoe_pl.report.costs import cost_table, cost_text
from fedmoe_pl.report.tables import Condition, curve_table, evaluated, explanation, in_markdown, methods_table


def markdown(conditions: Sequence[Condition]) -> str:
    """One table per condition, with a row per method, and below them what their numbers are."""
    of_models = [evaluated(condition.methods) for condition in conditions]
    common = [line for line in of_models[0] if all(line in lines for lines in of_models)]
    parts, explained = list[str](), list[str]()
    for condition, lines in zip(conditions, of_models, strict=True):
        facts = [f"{fact}." for fact in (condition.data, condition.seeds_text) if fact]
        parts += [f"### {in_markdown(condition.name)}"] if condition.name else []
        parts += [in_markdown(" ".join(facts)), methods_table(condition).markdown()]
        if condition.choices.rounds and (curves := curve_table(condition)).rows:
            of = axis_label(condition.metric).capitalize()
            parts += [f"{of}, after some rounds (a dash where a method was not evaluated):", curves.markdown()]
        if (target := condition.choices.target) is not None:
            parts += [
                in_markdown(cost_text(condition, target)),
                cost_table(condition, condition.metric, target).markdown(),
            ]
        parts += _bullets([line for line in lines if line not in common])
        explained += explanation(condition)
    return "\n\n".join([*parts, *_bullets([*dict.fromkeys(explained), *common])])


def _bullets(lines: Sequence[str]) -> list[str]:
    wrapped = [
        textwrap.fill(f"* {in_markdown(line)}.", 120, subsequent_indent="  ", break_long_words=False) for line in lines
    ]
    return ["\n".join(wrapped)] if wrapped else []


def with_section(page: str, name: str, text: str) -> str:
    r"""A page of Markdown with a new text between the marks of a section.

    The text's headings become bold lines: what comes after the section would else belong to the last of them.
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
