"""The table of a grid: printed, and written as CSV, Markdown and LaTeX."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fedmoe_pl.grids.cells import Cell, is_row_of
from fedmoe_pl.grids.grid import Grid, value_name
from fedmoe_pl.logs.summary import write_csv
from fedmoe_pl.report.markdown import markdown, methods_table
from fedmoe_pl.report.runs import read_run
from fedmoe_pl.report.settings import conditions, settings_of
from fedmoe_pl.report.tables import Choices, Condition, Published, condition_of, difference

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
_LATEX |= {character: f"\\{character}" for character in "&%$#_{}"} | {"<": "$<$", ">": "$>$"}


def write_tables(grid: Grid, runs: Sequence[tuple[Cell, Path]]) -> str:
    """Writes ``table.csv``, ``table.md`` and ``table.tex`` of finished cells, and returns the table as Markdown."""
    phases = dict.fromkeys(phase for cell, _ in runs for phase in cell.phases)
    settings, _ = settings_of(read_run(folder) for _, folder in runs)
    found = [condition_of(name, group) for name, group in conditions(settings).items()]
    shown = [[method for method in each.methods if any(is_row_of(method.name, p) for p in phases)] for each in found]
    found = [replace(each, methods=methods) for each, methods in zip(found, shown, strict=True)]
    choices, folder = Choices(baseline=grid.baseline), Path(grid.folder)
    text = markdown(found, choices)
    write_csv(folder / "table.csv", [row for each in found for row in _csv_rows(each, choices)])
    (folder / "table.md").write_text(f"{text}\n", encoding="utf-8")
    (folder / "table.tex").write_text("\n".join(_latex(each, choices) for each in found), encoding="utf-8")
    return text


def _csv_rows(condition: Condition, choices: Choices) -> Iterator[dict[str, object]]:
    """Yields a row for each method and metric; accuracies are fractions."""
    baseline = choices.baseline_of(condition)
    for method in condition.methods:
        cell, row = method.runs[0].cell, method.results[0]
        where = {"variant": cell["variant"]} if cell["variant"] else {}
        where |= {key: value_name(value) for key, value in cell["values"].items() if key != "seed_everything"}
        for metric in condition.metrics:
            spread = method.over_seeds(f"{metric}_mean")
            paper = (method.published(metric) or [Published("", math.nan, None)])[0]
            to = None if baseline is None or method is baseline else difference(method, baseline, metric)
            if math.isnan(spread.mean):
                continue
            yield {
                **where,
                "method": method.label,
                **{column: row[column] for column in ("model", "evaluation_point", "selection")},
                "metric": metric,
                "seeds": " ".join(str(run.seed) for run in method.runs),
                "mean": spread.mean,
                "std": spread.std,
                "paper": paper.mean / 100,
                "paper_std": math.nan if paper.std is None else paper.std / 100,
                "baseline": choices.baseline or "",
                "difference": to.mean if to else math.nan,
                "p": to.p_value if to else math.nan,
                "pairs": to.pairs if to else "",
                "more_than_noise": to.is_more_than_noise if to else "",
            }


def _latex(condition: Condition, choices: Choices) -> str:
    header, *lines = (" & ".join(map(_escape, line)) + r" \\" for line in methods_table(condition, choices))
    table = [
        f"% {condition.name or condition.data}; needs \\usepackage{{booktabs}}",
        rf"\begin{{tabular}}{{l{'r' * header.count(' & ')}}}",
        r"\toprule",
        header,
        r"\midrule",
        *lines,
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(table) + "\n"


def _escape(text: str) -> str:
    return re.sub(r"[\\~^±&%$#_{}<>]", lambda match: _LATEX[match[0]], text)
