"""The table of a grid as CSV, Markdown and LaTeX."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from fedmoe_pl.benchmark.grid import value_name
from fedmoe_pl.benchmark.published import Published
from fedmoe_pl.benchmark.results import Row
from fedmoe_pl.benchmark.table import has_paper, legend, metrics_of, p_text, points, published_percent
from fedmoe_pl.logs.summary import value_text, write_csv

_LATEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
_LATEX |= {character: f"\\{character}" for character in "&%$#_{}"} | {"<": "$<$", ">": "$>$"}


def write_tables(
    folder: Path, rows: Sequence[Row], words: Mapping[str, str], baseline: str | None, paper: Sequence[Published]
) -> list[Path]:
    """Writes ``table.csv``, ``table.md`` and ``table.tex``.

    Args:
        folder: the grid's folder.
        rows: the rows, at least one.
        words: how the keys of the grid are shortened.
        baseline: the method with which the others are compared, or None.
        paper: the published numbers.

    Returns:
        The files.

    Raises:
        MisconfigurationException: if a file cannot be written.
    """
    below = legend(rows, metrics_of(rows), baseline, paper)
    heading, lines = _texts(rows, words, baseline)
    files = [folder / f"table.{suffix}" for suffix in ("csv", "md", "tex")]
    write_csv(files[0], _csv_rows(rows, baseline))
    files[1].write_text(_markdown(heading, lines, below))
    files[2].write_text(_latex(heading, lines, below))
    return files


def _csv_rows(rows: Sequence[Row], baseline: str | None) -> Iterator[dict[str, object]]:
    """Yields a row for each condition, method and metric; accuracies are fractions."""
    for row in rows:
        model, moment, selection = row.evaluated
        for metric, number in row.numbers.items():
            paper, paper_std = number.paper or (math.nan, None)
            difference = number.difference
            yield {
                **{key: value_name(value) for key, value in row.condition.items()},
                "method": row.method,
                "model": model,
                "moment": moment,
                "selection": selection,
                "metric": metric,
                "seeds": " ".join(map(str, row.seeds)),
                "mean": number.spread.mean,
                "std": number.spread.std,
                "paper": paper / 100,
                "paper_std": math.nan if paper_std is None else paper_std / 100,
                "baseline": baseline or "",
                "difference": difference.mean if difference else math.nan,
                "p": difference.p_value if difference else math.nan,
                "pairs": difference.pairs if difference else "",
                "more_than_noise": difference.is_more_than_noise if difference else "",
            }


def _texts(rows: Sequence[Row], words: Mapping[str, str], baseline: str | None) -> tuple[list[str], list[list[str]]]:
    """The heading and the lines of a table with one column for each number."""
    metrics = metrics_of(rows)
    heading = [*(words.get(key, key) for key in rows[0].condition), "method"]
    for metric in metrics:
        heading.append(metric.replace("_", " "))
        heading += ["paper"] if has_paper(rows, metric) else []
        heading += [f"to {baseline}", "p (pairs)"] if baseline is not None else []
    lines = []
    for row in rows:
        line = [*map(value_name, row.condition.values()), row.method]
        for metric in metrics:
            number = row.numbers.get(metric)
            spread = number.spread if number else None
            std = f" ± {value_text(metric, spread.std)}" if spread and spread.seeds > 1 else ""
            line.append(f"{value_text(metric, spread.mean)}{std}" if spread else "-")
            line += [published_percent(number.paper if number else None)] if has_paper(rows, metric) else []
            if baseline is not None:
                difference = number.difference if number else None
                pairs = f" ({difference.pairs})" if difference else ""
                line += [points(metric, difference).strip(), f"{p_text(difference)}{pairs}"]
        lines.append(line)
    return heading, lines


def _markdown(heading: Sequence[str], lines: Sequence[Sequence[str]], below: Sequence[str]) -> str:
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in (heading, ["---"] * len(heading), *lines)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in escaped)
    return f"{table}\n" + "".join(f"* {line}\n" for line in below)


def _latex(heading: Sequence[str], lines: Sequence[Sequence[str]], below: Sequence[str]) -> str:
    columns = heading.index("method") + 1
    body = [" & ".join(map(_escape, line)) + r" \\" for line in (heading, *lines)]
    table = [
        *(f"% {line}" for line in below),
        r"% needs \usepackage{booktabs}",
        rf"\begin{{tabular}}{{{'l' * columns}{'r' * (len(heading) - columns)}}}",
        r"\toprule",
        body[0],
        r"\midrule",
        *body[1:],
        r"\bottomrule",
        r"\end{tabular}",
    ]
    return "\n".join(table) + "\n"


def _escape(text: str) -> str:
    return re.sub(r"[\\~^±&%$#_{}<>]", lambda match: _LATEX[match[0]], text)
