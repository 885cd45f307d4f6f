"""How pictures look, and maps of clients beside their samples; without pyplot, so that no global state remains."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from fedmoe_pl.rounds.run import Run

INK = "#000001"
"""The colour of text and lines: black in print. On a report's page it becomes that of the page's text."""
COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", INK)
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""
LINE_STYLES = ("-", "--", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
WIDTH = 3.4
"""Inches: a column of a two-column paper."""
_PIXELS = 700  # of the width: TensorBoard shows 350 and leaves out the others, but lines of one point survive
_MOST_NAMED = 40  # rows that have room for the client's id
_MOST_ROWS = 1000  # as many as there are pixels
_MOST_EXPERTS = 4  # with a map of their own each

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 7.5,
    "axes.titlesize": 8,
    "axes.labelsize": 7.5,
    "figure.titlesize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "grid.linewidth": 0.4,
    "grid.color": "#808080",
    "grid.alpha": 0.3,
    "lines.linewidth": 1.4,
    "lines.markersize": 3.5,
    "legend.frameon": False,
    "legend.handlelength": 2.4,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
    "pdf.fonttype": 42,  # journals refuse matplotlib's default, type 3
    "svg.fonttype": "path",
    "svg.hashsalt": "fedmoe",  # the same picture has the same bytes
    **dict.fromkeys(("text.parse_math", "text.usetex"), False),  # names of phases, classes and clients are plain text
    **dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK),
}
styled = matplotlib.rc_context(RC)
"""Decorator of functions that draw or render."""


class Style(NamedTuple):
    """How a method is drawn, as arguments of matplotlib's ``plot``."""

    color: str
    linestyle: str
    marker: str


def styles(labels: Iterable[str]) -> dict[str, Style]:
    """A style for each label, in the order in which they first appear."""
    found = {}
    for i, label in enumerate(dict.fromkeys(labels)):
        again = i // len(COLORS)
        line, marker = LINE_STYLES[again % len(LINE_STYLES)], MARKERS[(i + again) % len(MARKERS)]
        found[label] = Style(COLORS[i % len(COLORS)], line, marker)
    return found


def wrapped(label: str, width: int) -> str:
    r"""A label in lines of at most so many characters, as far as its words allow.

    Example:
        >>> wrapped("FedMoE-DA (top_p 5, mixing logits)", 20)
        'FedMoE-DA (top_p 5,\nmixing logits)'
    """
    return textwrap.fill(label, width, break_long_words=False, break_on_hyphens=False)


def new_figure(height: float) -> Figure:
    """An empty figure of a column's width and a height in inches."""
    return Figure(figsize=(WIDTH, height), layout="constrained")


@styled
def log_figure(run: Run, tag: str, draw: Callable[[], Figure], step: int, method: str | None = None) -> None:
    """Sends a figure to loggers that take pictures; without any, it is not drawn."""
    if not run.loggers.take_images:
        return
    figure = draw()
    figure.set_dpi(_PIXELS / WIDTH)
    figure.set_facecolor("white")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    run.loggers.log_image(tag, np.asarray(canvas.buffer_rgba())[..., :3].copy(), step, method)


def by_class(rows: Iterable[Mapping[str, Any]], kind: str = "class") -> np.ndarray:
    """The columns ``class_<c>``, or of another kind of label, of rows of a file, shape (rows, classes)."""
    return np.array([[row[name] for name in row if name.startswith(f"{kind}_")] for row in rows], dtype=float)


def names_of(rows: Iterable[Mapping[str, Any]]) -> dict[int, str]:
    """The clients' names, as far as the rows of a file have them."""
    return {int(row["client"]): row["name"] for row in rows if row.get("name")}


def client_order(counts: np.ndarray) -> list[int]:
    """Up to 40 clients in their order, more by their largest class and its share."""
    if len(counts) <= _MOST_NAMED or not counts.shape[1]:
        return [*range(len(counts))]
    shares = counts.max(axis=1) / np.maximum(counts.sum(axis=1), 1)
    return np.lexsort((-shares, counts.argmax(axis=1))).tolist()


@styled
def partition_figure(rows: Sequence[Mapping[str, Any]]) -> Figure:
    """Every client's samples, a row each: by class or bin of the target, and in training, validation and test sets."""
    kind = "bin" if "bin_0" in rows[0] else "class"
    counts = by_class(rows, kind)
    order = client_order(counts)
    ids = [int(rows[place]["client"]) for place in order]
    ordered = f"their largest {kind}" if order != sorted(order) else ""
    labels = {"label": "training and validation samples", "columns": kind, "names": names_of(rows)}
    figure, (axes,) = beside_samples(ids, counts[order], ordered, ratios=(3, 1), **labels)
    edges, before = np.arange(len(ids) + 1) - 0.5, np.zeros(len(ids))
    for name in ("train", "validation", "test"):
        after = before + np.array([rows[place][name] for place in order])
        if (after > before).any():
            bars = {"orientation": "horizontal", "fill": True, "label": name, "rasterized": len(ids) > _MOST_ROWS}
            axes.stairs(after, edges, baseline=before, **bars)  # one shape is faster than bars
        before = after
    axes.set(xlabel="samples", xlim=(0, None))
    figure.legend(loc="outside lower center", ncols=3)
    return figure


@styled
def gate_figure(
    rows: Sequence[Mapping[str, Any]], means: Mapping[int, float], counts: np.ndarray | None, title: str = ""
) -> Figure:
    """A gate's mean weights by client (row) and class (column), from a method's rows of ``gate_weights.csv``.

    Clients are sorted by ``means``, their mean weight of the global expert, beside ``counts``, their samples by class.
    A cell is blank if the client lacks the class. Where no expert is global, each of the first four has a map instead.
    """
    of_experts: dict[str, dict[int, np.ndarray]] = {}
    for row in rows:
        of_experts.setdefault(row["expert"], {})[int(row["client"])] = by_class([row])[0]
    ids = sorted({int(row["client"]) for row in rows})
    ids = [ids[place] for place in np.argsort([means.get(client, np.nan) for client in ids], kind="stable")]
    experts = [*of_experts][:_MOST_EXPERTS]
    samples = counts[ids] if len(experts) == 1 and counts is not None else None
    ordered = "mean weight" if len(experts) == 1 else ""
    figure, panels = beside_samples(ids, samples, ordered, title, panels=len(experts), names=names_of(rows))
    missing = np.full_like(by_class(rows[:1])[0], np.nan)
    images = []
    for axes, expert in zip(panels, experts, strict=True):
        weights = [of_experts[expert].get(client, missing) for client in ids]
        images.append(draw_map(axes, np.array(weights), "class"))
        if len(experts) > 1:
            axes.set_title(f"expert {expert}")
    label = "0 local expert,\n1 global expert" if experts == ["global"] else "weight of the expert"
    add_colorbar(figure, images[0], panels, label)
    return figure


def beside_samples(
    ids: Sequence[int],
    samples: np.ndarray | None,
    sorted_by: str,
    title: str = "",
    panels: int = 1,
    ratios: tuple[int, int] = (2, 3),
    label: str = "samples",
    columns: str = "class",
    names: Mapping[int, str] | None = None,
) -> tuple[Figure, list[Axes]]:
    """A figure with clients' samples by class, if there are any, on the left, and empty panels with the same rows.

    ``ids`` are the clients of the rows, from top to bottom; neighbouring rows of the same client have its id, or its
    name, once.
    """
    figure = new_figure(1.2 + min(max(0.115 * len(ids), 1.2), 4.8))
    figure.suptitle(title)
    has_samples = samples is not None and samples.shape[1] > 0
    widths = [ratios[0]] * has_samples + [ratios[1]] * panels
    first, *others = all_axes = figure.subplots(1, len(widths), sharey=True, width_ratios=widths, squeeze=False)[0]
    if samples is not None and has_samples:
        add_colorbar(figure, draw_map(first, samples, columns, "Blues", None), [first], label)
        first.set_facecolor(colormaps["Blues"](0))  # what shows between cells on a dark page
    clients = len({*ids})
    rows = [row for row, client in enumerate(ids) if row == 0 or ids[row - 1] != client]
    rows = rows[:: -(-len(rows) // _MOST_NAMED)]
    first.set_yticks(rows, [(names or {}).get(ids[row], str(ids[row])) for row in rows])
    first.set(
        ylabel=f"{clients} clients,\nsorted by {sorted_by}" if sorted_by else "client", ylim=(len(ids) - 0.5, -0.5)
    )
    return figure, others if has_samples else [*all_axes]


def draw_map(
    axes: Axes, values: np.ndarray, columns: str, colors: str = "viridis", highest: float | None = 1.0
) -> AxesImage:
    """Draws a value for each row and column, whose colours begin at 0; cells that are nan are blank."""
    colormap = colormaps[colors].with_extremes(bad="none")
    smoothing = "nearest" if len(values) <= _MOST_ROWS else "antialiased"
    masked = np.ma.masked_invalid(values)
    image = axes.imshow(masked, cmap=colormap, vmin=0.0, vmax=highest, aspect="auto", interpolation=smoothing)
    width = axes.get_position().width
    axes.set_xlabel(columns)
    axes.set_xticks(range(0, values.shape[1], -(-values.shape[1] // max(3, int(18 * width)))))
    return image


def add_colorbar(figure: Figure, image: AxesImage, axes: Sequence[Axes], label: str) -> None:
    """Says below axes what the colours of a map mean."""
    bar = figure.colorbar(image, ax=[*axes], location="bottom", fraction=0.04, pad=0.02, label=label)
    bar.outline.set_linewidth(0.4)
