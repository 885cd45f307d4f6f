"""A report's table in LaTeX, as wide as a column of an article with two."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from fedmoe_pl.evaluation.results import ACCURACIES
from fedmoe_pl.logs.summary import value_text
from fedmoe_pl.report.statistics import SIGNIFICANCE, OverSeeds
from fedmoe_pl.report.tables import Condition, Method, difference, difference_text, failures, meaning, one_line, words

_ESCAPES = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$"}
_ESCAPES |= {character: f"\\{character}" for character in "&%$#_{}"} | {"<": "$<$", ">": "$>$", "Δ": r"$\Delta$"}
# after the end of a row, brackets and stars are arguments; a quotation mark is a command of some languages
_ESCAPES |= {"[": "{[}", "]": "{]}", "*": "{*}", '"': r"\symbol{34}"}
_MOST_COLUMNS = 4  # of numbers, which fit beside the methods' names
_WIDTH = 10  # characters that fit above one of them


def latex(condition: Condition) -> str:
    r"""The methods in rows; for each metric the mean over clients and seeds, and the paper's number.

    The compared metric also has the difference to the baseline. The best mean of each metric is bold. The table needs
    ``\usepackage{booktabs,tabularx}``.
    """
    by_rank = [condition.metric, *(metric for metric in condition.metrics if metric != condition.metric)]
    blocks, left_out, room = dict[str, dict[str, list[str]]](), list[str](), _MOST_COLUMNS
    for metric in by_rank:
        block = _block(condition, metric)
        if len(block) <= room or not blocks:
            blocks[metric] = block
            room -= len(block)
        else:
            left_out.append(metric)
    groups = [rf"\multicolumn{{{len(block)}}}{{c}}{{{_heading(name, len(block))}}}" for name, block in blocks.items()]
    columns = [cells for block in blocks.values() for cells in block.values()]
    why = f"; left out, because they do not fit: {', '.join(left_out)}" if left_out else ""
    lines = [
        rf"% needs \usepackage{{booktabs,tabularx}}{why}",
        r"\begin{table}[t]",
        r"\centering\footnotesize\setlength{\tabcolsep}{3pt}",
        rf"\caption{{{_caption(condition)}}}",
        rf"\begin{{tabularx}}{{\columnwidth}}{{>{{\raggedright\arraybackslash}}X{'r' * len(columns)}}}",
        r"\toprule",
        _row(["", *groups]),
        " ".join(_rules(blocks.values())),
        _row(["method", *(title for block in blocks.values() for title in block)]),
        r"\midrule",
        *(_row([_unbroken(m.label), *cells]) for m, *cells in zip(condition.methods, *columns, strict=True)),
        r"\bottomrule",
        r"\end{tabularx}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _block(condition: Condition, metric: str) -> dict[str, list[str]]:
    """The columns of a metric by their titles."""
    methods, baseline = condition.methods, condition.baseline
    spreads = [method.over_seeds(f"{metric}_mean") for method in methods]
    texts = [value_text(metric, spread.mean) for spread in spreads]
    best = _best(texts, condition.lower_is_better(metric))
    numbers = [_number(metric, spread, text == best) for spread, text in zip(spreads, texts, strict=True)]
    if any(method.published(metric) for method in methods):
        block = {"ours": numbers, "paper": [_published(method, metric) for method in methods]}
    else:
        block = {"accuracy" if metric in ACCURACIES else "mean": numbers}
    if baseline is not None and metric == condition.metric:
        block[r"$\Delta$"] = [
            r"\textemdash" if method is baseline else _difference(method, baseline, metric) for method in methods
        ]
    return block


def _best(texts: Sequence[str], lower_is_better: bool) -> str:
    """The best value as it is shown, so that methods which look equal are equally bold."""
    shown = [text for text in texts if text != "-"]
    return (min if lower_is_better else max)(shown, key=float, default="")


def _number(metric: str, spread: OverSeeds, is_best: bool) -> str:
    if math.isnan(spread.mean):
        return "--"
    text = value_text(metric, spread.mean)
    return _with_deviation(
        rf"\mathbf{{{text}}}" if is_best else text,
        "" if math.isnan(spread.std) else value_text(metric, spread.std),
    )


def _published(method: Method, metric: str) -> str:
    cells = method.published(metric)
    texts = [_with_deviation(f"{cell.mean:.2f}", "" if cell.std is None else f"{cell.std:.2f}") for cell in cells]
    return " / ".join(texts) or "--"


def _with_deviation(mean: str, deviation: str) -> str:
    return rf"${mean}_{{\pm {deviation}}}$" if deviation else f"${mean}$"


def _difference(method: Method, baseline: Method, metric: str) -> str:
    text = difference_text(metric, difference(method, baseline, metric))
    return "--" if text == "-" else f"${text.replace('*', '^{*}')}$"


def _caption(condition: Condition) -> str:
    facts = [fact for fact in (condition.name, condition.data, condition.seeds_text, meaning(condition)) if fact]
    baseline = condition.baseline
    if baseline is not None:
        facts.append(f"Δ: difference to {baseline.label} in {words(condition.metric)}")
        if any(difference(m, baseline, condition.metric).is_more_than_noise for m in condition.methods):
            facts[-1] += (
                f"; *: p < {SIGNIFICANCE} in a Wilcoxon signed-rank test over the clients of all seeds, and the same "
                "sign in every seed"
            )
    facts += failures(condition)
    names = condition.name, condition.data  # begin with keys or names of files, which stay as they are
    sentences = ". ".join(fact if fact in names else fact[0].upper() + fact[1:] for fact in facts)
    return in_latex(f"{sentences}.")


def _heading(metric: str, columns: int) -> str:
    """The name of a metric, which would make its columns wider than their numbers, in several lines."""
    lines = [in_latex(line) for line in textwrap.wrap(words(metric), _WIDTH * columns)]
    return lines[0] if len(lines) == 1 else r"\shortstack{" + r"\\".join(lines) + "}"


def _unbroken(label: str) -> str:
    """A name that is broken at its spaces only."""
    return " ".join(rf"\mbox{{{in_latex(word)}}}" if "-" in word else in_latex(word) for word in label.split(" "))


def _rules(blocks: Iterable[dict[str, list[str]]]) -> Iterator[str]:
    """A rule below the name of each metric."""
    first = 2
    for block in blocks:
        yield rf"\cmidrule(lr){{{first}-{first + len(block) - 1}}}"
        first += len(block)


def _row(cells: Sequence[str]) -> str:
    return " & ".join(cells) + r" \\"


def in_latex(text: str) -> str:
    """A text as LaTeX that shows it as it is."""
    return one_line(text).translate(str.maketrans(_ESCAPES))
