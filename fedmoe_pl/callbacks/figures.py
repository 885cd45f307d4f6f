"""Figures of evaluations, drawn without pyplot, so that there is no global state and no window to close."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from fedmoe_pl.evaluation.evaluation import METRICS, Evaluation
from fedmoe_pl.logs.summary import present_metrics, scale

COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""

LINE_STYLES = ("-", "--", ":")
_MOST_NAMED_CLASSES = 20  # whose colours are named
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def sorted_accuracy_figure(evaluations: Iterable[Evaluation]) -> Figure:
    """The clients' accuracies in ascending order (their cumulative distribution), one line per method.

    A line through (0.1, 50 %) means that the worst tenth of the clients have accuracies of at most 50 %.

    Args:
        evaluations: at least one; each accuracy that a client has gets a panel.
    """
    evaluations = list(evaluations)
    metrics = present_metrics(evaluations)
    figure = empty_figure(height=0.9 + 2.6 * len(metrics))
    panels = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
    for axes, metric in zip(panels, metrics, strict=True):
        for i, evaluation in enumerate(evaluations):
            values = scale(metric) * np.array(evaluation.values(metric))
            if len(values):
                line = {"color": COLORS[i % len(COLORS)], "linestyle": LINE_STYLES[i // len(COLORS) % len(LINE_STYLES)]}
                axes.ecdf(values, orientation="horizontal", lw=2.0, label=evaluation.method, **line)
        label = "accuracy in percent" if metric in METRICS else metric.replace("_", " ")
        axes.set(title=f"{metric.replace('_', ' ')}: all clients, sorted", xlim=(0, 1), ylabel=label)
        axes.grid(alpha=0.4)
    panels[-1].set_xlabel("share of clients with at most this value")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    return figure


def representation_figure(
    method: str, points: Mapping[str, np.ndarray], classes: np.ndarray, clients: np.ndarray
) -> Figure:
    """Representations as points in the plane: a panel for each kind, colours for classes, markers for clients.

    Args:
        method: the method's name, for the titles.
        points: points (n, 2) by kind of representation.
        classes: classes of the samples, shape (n,).
        clients: clients of the samples, shape (n,).
    """
    figure = empty_figure(height=0.9 + 2.6 * len(points))
    panels = figure.subplots(len(points), 1, squeeze=False)[:, 0]
    colormap = colormaps["tab10" if classes.max() < 10 else "nipy_spectral"]
    colors = colormap(classes if classes.max() < 10 else classes / classes.max())
    for axes, (name, places) in zip(panels, points.items(), strict=True):
        for i, client in enumerate(np.unique(clients)):
            of_client = clients == client
            x, y = places[of_client].T
            axes.scatter(
                x, y, c=colors[of_client], marker=MARKERS[i % len(MARKERS)], s=16, lw=0, label=f"client {client}"
            )
        axes.set(title=f"{method}: {name} representations, t-SNE", xticks=[], yticks=[])
    handles, labels = panels[0].get_legend_handles_labels()
    legend = figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    for handle in legend.legend_handles:
        if isinstance(handle, PathCollection):
            handle.set_color("black")  # a client's samples have the colours of their classes
    shown, first = np.unique(classes, return_index=True)
    if 1 < len(shown) <= _MOST_NAMED_CLASSES:
        of_classes = [
            Patch(color=tuple(colors[place]), label=str(label)) for label, place in zip(shown, first, strict=True)
        ]
        figure.legend(handles=of_classes, title="class", loc="outside right center", frameon=False)
    return figure


def cluster_picks_figure(method: str, picks: Tensor) -> Figure:
    """How many clients picked each cluster (row) in each round (column).

    Args:
        method: name of the phase.
        picks: numbers of clients, shape (rounds, clusters).
    """
    figure = empty_figure(height=min(1.5 + 0.3 * picks.shape[1], 9.0))
    axes = figure.subplots()
    edges = (0.5, len(picks) + 0.5, picks.shape[1] - 0.5, -0.5)  # rounds count from 1, clusters from 0
    image = axes.imshow(picks.T.numpy(), vmin=0, aspect="auto", interpolation="nearest", extent=edges)
    figure.colorbar(image, fraction=0.06, label="clients")
    axes.set(xlabel="round", ylabel="cluster", title=f"{method}: how many clients picked each cluster")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_yticks(range(picks.shape[1]))
    return figure


def empty_figure(height: float) -> Figure:
    """An empty figure, 700 pixels wide.

    TensorBoard shrinks figures to 350 pixels by leaving out pixels. At 144 dots per inch one point is two pixels, so
    lines of one point survive.

    Args:
        height: in inches.
    """
    return Figure(figsize=(700 / 144, height), dpi=144, layout="constrained")


def figure_pixels(figure: Figure) -> np.ndarray:
    """Renders a figure to pixels, a uint8 array of shape (height, width, 3)."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()
