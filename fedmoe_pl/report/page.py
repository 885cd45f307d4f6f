"""The page of a report: one HTML file that needs no other file and no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedmoe_pl.report.runs import RunFiles
from fedmoe_pl.report.sections import Section, Table
from fedmoe_pl.report.settings import Setting, brief, differences
from fedmoe_pl.report.style import INK, Style

_LONGEST = 120  # characters of a configuration's value


def page(
    sections: Sequence[Section],
    settings: Sequence[Setting],
    styles: Mapping[str, Style],
    facts: Mapping[str, Any],
) -> str:
    """The page as HTML.

    Args:
        sections: a section for each condition.
        settings: all settings, whose differences the page lists.
        styles: the style of each method's label.
        facts: ``title``, ``origin`` (when and where it was made), ``command``, ``notes``, and ``folder`` of the PDFs.
    """
    environment = Environment(
        loader=PackageLoader("fedmoe_pl.report", ""), autoescape=True, undefined=StrictUndefined, trim_blocks=False
    )
    colors = {label: "currentColor" if style.color == INK else style.color for label, style in styles.items()}
    runs = [_run(run) for setting in settings for run in setting.runs]
    return environment.get_template("page.html").render(
        sections=sections, colors=colors, runs=runs, differences=_differences(settings), **facts
    )


def _differences(settings: Sequence[Setting]) -> Mapping[str, Any]:
    table = Table([setting.name for setting in settings], [])
    for key, values in differences(settings).items():
        table.rows.append((key, [_shortened(brief(value)) for value in values]))
    if len(settings) == 1:
        text = "There is only one configuration." if len(settings[0].runs) == 1 else "Only the seed."
    else:
        several = any(len(setting.runs) > 1 for setting in settings)
        text = "Runs that differ only in the seed are one column. " if several else ""
        text += "Keys of a phase are compared among the runs that have it."
    return {"header": table.header, "rows": table.rows, "text": text}


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
