"""The page of a report: one HTML file that needs no other file and no network."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from fedmoe_pl.report.runs import RunFiles
from fedmoe_pl.report.sections import Section
from fedmoe_pl.report.settings import agreed, differences
from fedmoe_pl.report.style import INK, Style
from fedmoe_pl.report.tables import Condition, Table

_LONGEST = 120  # characters of a configuration's value


def page(
    sections: Sequence[Section],
    conditions: Sequence[Condition],
    styles: Mapping[str, Style],
    facts: Mapping[str, Any],
) -> str:
    """The page as HTML.

    Args:
        sections: a section for each condition.
        conditions: the conditions.
        styles: the style of each method's label.
        facts: ``title``, ``origin`` (when and where it was made), ``command``, ``notes``, and ``folder`` of the PDFs.
    """
    environment = Environment(
        loader=PackageLoader("fedmoe_pl.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=False
    )
    environment.filters["breakable"] = _breakable
    colors = {label: "currentColor" if style.color == INK else style.color for label, style in styles.items()}
    settings = [setting for condition in conditions for setting in condition.settings]
    runs = [_run(run) for setting in settings for run in setting.runs]
    return environment.get_template("page.html").render(
        sections=sections,
        colors=colors,
        runs=runs,
        is_repeated=len(settings) == 1 < len(runs),
        differences=_differences(conditions),
        **facts,
    )


def _differences(conditions: Sequence[Condition]) -> Table:
    """The keys in which conditions differ, each of which is the same in all settings of a condition."""
    rows = differences([agreed(condition.settings) for condition in conditions])
    shown = [(key, [_shortened(value) for value in values]) for key, values in rows.items()]
    return Table(["key", *(condition.name for condition in conditions)], shown)


def _breakable(text: str) -> Markup:
    """A name that may be broken into lines after punctuation."""
    return Markup(re.sub(r"([/,=_])(?=\S)", r"\1<wbr>", str(escape(text))))


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _run(run: RunFiles) -> Mapping[str, Any]:
    return {
        "name": run.name,
        "seed": "-" if run.seed is None else run.seed,
        "state": "finished" if run.is_finished else "not finished",
        "date": written(run.folder),
        "folder": str(run.folder),
    }


def written(folder: Path) -> str:
    """When a run wrote its newest result, in local time."""
    times = [path.stat().st_mtime for path in (folder / "rounds.csv", folder / "summary.csv") if path.exists()]
    return datetime.fromtimestamp(max(times)).strftime("%Y-%m-%d %H:%M")
