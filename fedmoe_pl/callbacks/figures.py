"""Figures of evaluations, drawn without pyplot, so that there is no global state and no window to close."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from matplotlib import colormaps
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from fedmoe_pl.rounds.evaluation import Evaluation
from fedmoe_pl.rounds.results import expert_usage, mean_gate_weight_by_class, present_metrics

COLORS = ("#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9", "#000000")
"""Okabe and Ito's colours, which colour-blind readers can tell apart."""

LINE_STYLES = ("-", "--", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")


def gate_weight_figure(evaluation: Evaluation, num_classes: int) -> Figure:
    """Mean weight of the global expert by client (row) and class (column); blank if the client lacks the class.

    The colours always span 0 (local expert alone) to 1 (global expert alone), so that figures can be compared.

    Args:
        evaluation: an evaluation of a model with a gate.
        num_classes: number of classes of the data.
    """
    weights = mean_gate_weight_by_class(evaluation, num_classes).numpy()
    figure = _figure(height=min(1.3 + 0.26 * max(len(weights), 6), 9.0))
    axes = figure.subplots()
    colormap = colormaps["viridis"].with_extremes(bad="white")
    masked = np.ma.masked_invalid(weights)
    image = axes.imshow(masked, cmap=colormap, vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest")
    figure.colorbar(image, fraction=0.06, label="0 = local expert alone, 1 = global expert alone")
    axes.set(xlabel="class", ylabel="client", title=f"{evaluation.method}: mean weight of the global expert")
    if num_classes <= 20:
        axes.set_xticks(range(num_classes))
    if len(weights) <= 30:
        axes.set_yticks(range(len(weights)), [str(client.client) for client in evaluation.clients])
    if len(weights) <= 30 and num_classes <= 10:  # there is room for a number in every cell
        for (row, column), weight in np.ndenumerate(weights):
            if not np.isnan(weight):
                color = "white" if weight < 0.6 else "black"
                axes.text(column, row, f"{weight:.2f}", ha="center", va="center", fontsize=8, color=color)
    return figure


def expert_usage_figure(evaluation: Evaluation) -> Figure:
    """Share of each client's own samples (row) that its gate sends to each expert (column).

    A cell is blank if the client lacks the expert.

    Args:
        evaluation: an evaluation of a mixture that sends every sample to one expert.
    """
    shares = expert_usage(evaluation).numpy()
    figure = _figure(height=min(1.3 + 0.26 * max(len(shares), 6), 9.0))
    axes = figure.subplots()
    colormap = colormaps["viridis"].with_extremes(bad="white")
    image = axes.imshow(
        np.ma.masked_invalid(shares), cmap=colormap, vmin=0.0, vmax=1.0, aspect="auto", interpolation="nearest"
    )
    figure.colorbar(image, fraction=0.06, label="share of the client's own samples")
    axes.set(xlabel="expert", ylabel="client", title=f"{evaluation.method}: which expert serves whom")
    axes.set_xticks(range(shares.shape[1]))
    if len(shares) <= 30:
        axes.set_yticks(range(len(shares)), [str(client.client) for client in evaluation.clients])
    return figure


def aggregation_figure(matrix: Tensor, owners: Tensor, method: str) -> Figure:
    """The weight that each expert (row) gives each expert (column) in its mean; white lines separate the clients.

    Args:
        matrix: weights (experts, experts); every row adds up to 1.
        owners: client of each expert, ascending, shape (experts,).
        method: the method's name, for the title.
    """
    figure = _figure(height=4.4)
    axes = figure.subplots()
    image = axes.imshow(matrix.numpy(), cmap="viridis", vmin=0.0, interpolation="nearest")
    figure.colorbar(image, fraction=0.06, label="weight in the mean")
    starts = (owners.diff() > 0).nonzero().flatten().add(1).tolist()
    if len(starts) < 30:
        for start in starts:
            axes.axhline(start - 0.5, color="white", lw=0.5)
            axes.axvline(start - 0.5, color="white", lw=0.5)
    axes.set(xlabel="expert of (by client)", ylabel="expert (by client)", title=f"{method}: who is averaged with whom")
    places = [0, *starts]
    shown = places[:: -(-len(places) // 20)]
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(shown, [str(int(owners[place])) for place in shown])
    return figure


def sorted_accuracy_figure(evaluations: Iterable[Evaluation]) -> Figure:
    """The clients' accuracies in ascending order (their cumulative distribution), one line per method.

    A line through (0.1, 50 %) means that the worst tenth of the clients have accuracies of at most 50 %.

    Args:
        evaluations: at least one; each accuracy that a client has gets a panel.
    """
    evaluations = list(evaluations)
    metrics = present_metrics(evaluations)
    figure = _figure(height=0.9 + 2.6 * len(metrics))
    panels = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
    for axes, metric in zip(panels, metrics, strict=True):
        for i, evaluation in enumerate(evaluations):
            values = 100 * np.array([getattr(client, metric) for client in evaluation.clients])
            values = values[~np.isnan(values)]
            if len(values):
                line = {"color": COLORS[i % len(COLORS)], "linestyle": LINE_STYLES[i // len(COLORS) % len(LINE_STYLES)]}
                axes.ecdf(values, orientation="horizontal", lw=2.0, label=evaluation.method, **line)
        axes.set(title=f"{metric.replace('_', ' ')}: all clients, sorted", xlim=(0, 1), ylabel="accuracy in percent")
        axes.grid(alpha=0.4)
    panels[-1].set_xlabel("share of clients with at most this accuracy")
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
    figure = _figure(height=0.9 + 2.6 * len(points))
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
    return figure


def cluster_picks_figure(method: str, picks: Tensor) -> Figure:
    """How many clients picked each cluster (row) in each round (column).

    Args:
        method: name of the phase.
        picks: numbers of clients, shape (rounds, clusters).
    """
    figure = _figure(height=min(1.5 + 0.3 * picks.shape[1], 9.0))
    axes = figure.subplots()
    edges = (0.5, len(picks) + 0.5, picks.shape[1] - 0.5, -0.5)  # rounds count from 1, clusters from 0
    image = axes.imshow(picks.T.numpy(), vmin=0, aspect="auto", interpolation="nearest", extent=edges)
    figure.colorbar(image, fraction=0.06, label="clients")
    axes.set(xlabel="round", ylabel="cluster", title=f"{method}: how many clients picked each cluster")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_yticks(range(picks.shape[1]))
    return figure


def _figure(height: float) -> Figure:
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
