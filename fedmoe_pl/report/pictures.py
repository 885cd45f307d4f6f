"""Learning curves, costs and the distribution over clients, and how pictures become SVG and PDF."""

from __future__ import annotations

import io
import math
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from markupsafe import escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator, NullFormatter

from fedmoe_pl.callbacks.cost_to_target import spent
from fedmoe_pl.callbacks.figures import INK, Style, new_figure, styled, wrapped
from fedmoe_pl.logs.summary import axis_label, scale
from fedmoe_pl.report.costs import has_costs
from fedmoe_pl.report.runs import Row
from fedmoe_pl.report.tables import Method, one_line

_MOST_POINTS = 120  # points of a method that are drawn beside its box
_LEGEND = 22  # characters of a line in the legend
_NAMES = 18  # and beside a box
_LONGEST = 50  # of a file's name, of characters that may have several bytes each
AMOUNTS = {"bytes": "bytes sent", "flops": "FLOPs of local training"}


@styled
def curves_figure(methods: Sequence[Method], metric: str, styles: Mapping[str, Style]) -> Figure | None:
    """Mean of the clients over rounds; methods that were evaluated in one round are points at the right edge."""
    curves = [(method, *_curve(method, metric)) for method in methods]
    if all(len(rounds) < 2 for _, rounds, _, _ in curves):
        return None
    figure, axes = _above_legend(methods)
    single = []
    for method, rounds, mean, std in curves:
        if len(rounds) < 2:
            single.append((method, mean, std))
            continue
        style = styles[method.label]
        axes.plot(rounds, mean, label=method.label, markevery=max(1, len(rounds) // 8), **style._asdict())
        axes.fill_between(rounds, mean - std, mean + std, color=style.color, alpha=0.18, lw=0)
    axes.set(xlabel="round", ylabel=axis_label(metric))
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    _draw_single(axes, single, styles)
    _add_legend(figure, axes, methods)
    return figure


def _curve(method: Method, metric: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rounds that all seeds evaluated, and mean and sample standard deviation over seeds, which is 0 of one seed."""
    of_runs = [{row["round"]: _mean(row, metric) for row in run.rounds} for run in method.runs]
    common = sorted(set.intersection(*(set(values) for values in of_runs)))
    common = [round for round in common if not any(math.isnan(values[round]) for values in of_runs)]
    values = np.array([[of_run[round] for round in common] for of_run in of_runs])
    std = values.std(axis=0, ddof=1) if len(of_runs) > 1 else np.zeros(len(common))
    return np.array(common), values.mean(axis=0), std


def _mean(row: Row, metric: str) -> float:
    """The mean over the clients, of an accuracy in percent; nan if the run does not have the metric."""
    return scale(metric) * row.get(f"{metric}_mean", math.nan)


def _draw_single(
    axes: Axes, single: Sequence[tuple[Method, np.ndarray, np.ndarray]], styles: Mapping[str, Style]
) -> None:
    drawn = [(method, mean, std) for method, mean, std in single if len(mean)]
    if not drawn:
        return
    left, right = axes.get_xlim()
    step = 0.035 * (right - left)
    for i, (method, mean, std) in enumerate(drawn):
        style = styles[method.label]
        place = right + step * (i % 4 + 0.5)  # beside each other, as they often have nearly the same accuracy
        error = std if len(method.runs) > 1 else None
        axes.errorbar(place, mean, error, fmt=style.marker, color=style.color, label=method.label, elinewidth=0.8)
    axes.axvline(right, color=INK, lw=0.4, ls=":")
    axes.set_xticks([tick for tick in axes.get_xticks() if left <= tick <= right])
    axes.set_xlim(left, right + step * (min(len(drawn), 4) + 0.5))


@styled
def cost_figure(methods: Sequence[Method], metric: str, amount: str, styles: Mapping[str, Style]) -> Figure | None:
    """Mean of the clients over what was sent or computed until then, on a logarithmic axis; a line for each seed."""
    figure, axes = _above_legend(methods)
    drawn = []
    for method in methods:
        for run in filter(has_costs, method.runs):
            points = [(spent(row)[amount], _mean(row, metric)) for row in run.rounds]
            points = [point for point in points if point[0] > 0 and not math.isnan(point[1])]
            if len(points) > 1:
                style, every = styles[method.label]._asdict(), max(1, len(points) // 6)
                label = method.label if method not in drawn else None
                axes.plot(*zip(*points, strict=True), label=label, lw=1.0, markevery=every, **style)
                drawn.append(method)
    if not drawn:
        return None
    axes.set(xscale="log", xlabel=f"{AMOUNTS[amount]}, all clients", ylabel=axis_label(metric))
    _label_amounts(axes)
    _add_legend(figure, axes, methods)
    return figure


def _label_amounts(axes: Axes) -> None:
    """Labels a logarithmic axis, such as 20M: powers of ten, or over fewer decades also numbers between them."""
    left, right = axes.get_xlim()
    between = {0: (1, 2, 3, 4, 6), 1: (1, 2, 5)}.get(int(math.log10(right / left)), (1,))
    axes.xaxis.set_major_locator(LogLocator(subs=between, numticks=7))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.xaxis.set_minor_formatter(NullFormatter())


@styled
def distribution_figure(methods: Sequence[Method], metric: str, styles: Mapping[str, Style]) -> Figure | None:
    """Boxes over the clients of all seeds: quartiles, whiskers of at most 1.5 times the box, the mean as a diamond."""
    values = {method.label: scale(metric) * np.array(method.of_clients(metric)) for method in methods}
    values = {label: of_clients for label, of_clients in values.items() if len(of_clients)}
    if not values:
        return None
    lines = [max(2, 1 + wrapped(label, _NAMES).count("\n")) for label in values]
    places = np.cumsum(lines) - np.array(lines) / 2  # in lines of text, so that names have room
    figure = new_figure(0.55 + 0.13 * sum(lines))
    axes = figure.subplots()
    rng = np.random.default_rng(0)
    for place, (label, of_clients) in zip(places, values.items(), strict=True):
        _draw_box(axes, place, of_clients, styles[label].color)
        if len(of_clients) <= _MOST_POINTS:
            heights = place + rng.uniform(-0.4, 0.4, len(of_clients))
            axes.plot(of_clients, heights, ".", ms=3, mec="none", color=styles[label].color, alpha=0.5, zorder=0)
    axes.set_yticks(places, [wrapped(label, _NAMES) for label in values])
    axes.set(ylim=(sum(lines), 0), xlabel=axis_label(metric))
    axes.grid(axis="x")
    return figure


def _draw_box(axes: Axes, place: float, values: np.ndarray, color: str) -> None:
    line = {"color": color, "lw": 0.9}
    axes.boxplot(
        values,
        positions=[place],
        orientation="horizontal",
        widths=1.15,
        showfliers=len(values) > _MOST_POINTS,
        boxprops=line,
        whiskerprops=line,
        capprops=line,
        medianprops=line | {"lw": 1.8},
        flierprops={"marker": ".", "ms": 2, "mfc": color, "mec": "none", "alpha": 0.6},
        showmeans=True,
        meanprops={"marker": "D", "ms": 3, "mfc": color, "mec": "none"},
    )


def _above_legend(methods: Sequence[Method]) -> tuple[Figure, Axes]:
    """A figure with room for the legend, whose columns matplotlib fills from top to bottom."""
    lines = [1 + wrapped(method.label, _LEGEND).count("\n") for method in methods]
    rows = math.ceil(len(lines) / _columns(methods))
    figure = new_figure(2.4 + 0.125 * max(sum(lines[start : start + rows]) for start in range(0, len(lines), rows)))
    return figure, figure.subplots()


def _columns(methods: Sequence[Method]) -> int:
    longest = max(len(line) for method in methods for line in wrapped(method.label, _LEGEND).split("\n"))
    return 3 if longest <= 13 else 2 if longest <= 22 else 1


def _add_legend(figure: Figure, axes: Axes, methods: Sequence[Method]) -> None:
    axes.grid(axis="y")
    # matplotlib's own search leaves out names that begin with "_"
    drawn: dict[Any, Any] = {artist.get_label(): artist for artist in (*axes.get_lines(), *axes.containers)}
    names = {method.label: wrapped(method.label, _LEGEND) for method in methods if method.label in drawn}
    look = {"loc": "outside lower center", "ncols": _columns(methods), "columnspacing": 1.2}
    figure.legend([drawn[label] for label in names], [*names.values()], **look)


class Picture(NamedTuple):
    """A drawn picture, as SVG for the page and as PDF for a paper; the name is that of its file, without suffix."""

    name: str
    caption: str
    svg: str
    pdf: bytes


@styled
def picture(name: str, caption: str, figure: Figure) -> Picture:
    """Renders a figure as SVG for the page, and as PDF."""
    name = re.sub(r"[^\w.-]+", "_", name).strip("_")
    name = name if len(name) <= _LONGEST else f"{name[:_LONGEST]}_{zlib.crc32(name.encode()):08x}"
    figure.draw_without_rendering()  # the layout, once for both files
    figure.set_layout_engine("none")
    return Picture(name, caption, _svg(name, caption, figure), _saved(figure, "pdf", {"CreationDate": None}))


def _svg(name: str, caption: str, figure: Figure) -> str:
    """The ``svg`` element, whose ids are no other picture's, as all of them are in the same page."""
    text = _saved(figure, "svg", {"Date": None, "Creator": None, "Type": None, "Format": None}).decode()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", text)
    _, box, text = re.split(r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', text, maxsplit=1)
    text = f'<svg viewBox="{box}" role="img" aria-label="{escape(one_line(caption))}">{text}'
    return text.replace(INK, "currentColor").replace("xlink:href", "href")


def _saved(figure: Figure, format: str, metadata: dict[str, Any]) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format=format, metadata=metadata, dpi=300)  # of large maps, which are images
    return file.getvalue()
