"""Heat maps of all clients, each beside the clients' samples: the same rows in the same order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from fedmoe_pl.callbacks.figures import empty_figure
from fedmoe_pl.evaluation.evaluation import Evaluation
from fedmoe_pl.evaluation.gate_weights import expert_usage, mean_gate_weight_by_class

_MOST_NAMED = 100  # clients whose rows have their ids
_MOST_WITH_NUMBERS = 30  # clients whose cells have numbers
_MOST_TICKS = 20
_MOST_IDS_BELOW = 12  # ids of clients side by side, which may have three digits


def gate_weight_figure(evaluation: Evaluation, counts: Tensor) -> Figure:
    """Mean weight of the global expert by client (row) and class (column), beside the client's samples by class.

    Clients are sorted by their mean weight, so that those who rely on the local expert are above. A cell is blank if
    the client lacks the class. The colours always span 0 (local expert alone) to 1 (global expert alone), so that
    figures can be compared.

    Args:
        evaluation: an evaluation of a model with a gate.
        counts: samples of each client and class, shape (all clients, classes).
    """
    means = np.array([client.mean_gate_weight for client in evaluation.clients])
    order = np.argsort(means, kind="stable")  # nan comes last
    weights = mean_gate_weight_by_class(evaluation, counts.shape[1]).numpy()[order]
    ids = [evaluation.clients[place].client for place in order]
    figure, axes = _beside_samples(ids, counts, f"{evaluation.method}: mean weight of the global expert", "mean weight")
    _draw(figure, axes, weights, "0 local expert, 1 global expert")
    _name_columns(axes, "class", weights.shape[1])
    if len(weights) <= _MOST_WITH_NUMBERS and weights.shape[1] <= 10:  # there is room for a number in every cell
        for (row, column), weight in np.ndenumerate(weights):
            if not np.isnan(weight):
                color = "white" if weight < 0.6 else "black"
                axes.text(column, row, f"{weight:.2f}", ha="center", va="center", fontsize=6, color=color)
    return figure


def expert_usage_figure(evaluation: Evaluation, counts: Tensor) -> Figure:
    """Share of each client's own samples (row) that its gate sends to each expert (column), beside its samples.

    Clients with the same most used expert are neighbours. A cell is blank if the client lacks the expert.

    Args:
        evaluation: an evaluation of a mixture that sends every sample to one expert.
        counts: samples of each client and class, shape (all clients, classes).
    """
    shares = expert_usage(evaluation).numpy()
    known = np.nan_to_num(shares)
    order = np.lexsort((-known.max(axis=1), known.argmax(axis=1)))
    ids = [evaluation.clients[place].client for place in order]
    title = f"{evaluation.method}: which expert serves whom"
    figure, axes = _beside_samples(ids, counts, title, "most used expert")
    _draw(figure, axes, shares[order], "share of the client's own samples")
    _name_columns(axes, "expert", shares.shape[1])
    return figure


def cluster_figure(method: str, clusters: Mapping[int, int], num_clusters: int, counts: Tensor) -> Figure:
    """The cluster (column) whose model each client (row) uses, beside the clients' samples.

    Clients of the same cluster are neighbours; in a cluster, those with the same most frequent class are.

    Args:
        method: the method's name, for the title.
        clusters: the cluster of each client, by the client's id.
        num_clusters: number of clusters.
        counts: samples of each client and class, shape (all clients, classes).
    """
    largest = counts.argmax(dim=1).tolist() if counts.shape[1] else [0] * len(counts)
    ids = sorted(clusters, key=lambda client: (clusters[client], largest[client], client))
    is_own = np.array([[float(clusters[client] == cluster) for cluster in range(num_clusters)] for client in ids])
    figure, axes = _beside_samples(ids, counts, f"{method}: which cluster's model serves whom", "cluster")
    axes.imshow(is_own, cmap="Greens", vmin=0.0, vmax=1.4, aspect="auto", interpolation="nearest")
    _name_columns(axes, "cluster", num_clusters)
    return figure


def aggregation_figure(matrix: Tensor, owners: Tensor, method: str, counts: Tensor) -> Figure:
    """The weight that each expert (row) gives each expert (column) in its mean, beside its client's samples.

    Clients that average their experts with one another are neighbours, and white lines separate them. If there are more
    than 30, a cell is the total weight that a client's experts give another client's, as the mean over the former.

    Args:
        matrix: weights (experts, experts); every row adds up to 1.
        owners: client of each expert, ascending, shape (experts,).
        method: the method's name, for the title.
        counts: samples of each client and class, shape (all clients, classes).
    """
    weights, of_experts = matrix.numpy(), owners.numpy()
    clients = _similar_together(weights, of_experts)
    if len(clients) > _MOST_WITH_NUMBERS:
        weights, of_experts = _between_clients(weights, of_experts), np.unique(of_experts)
    order = np.concatenate([np.flatnonzero(of_experts == client) for client in clients])
    ids = of_experts[order]
    title = f"{method}: who is averaged with whom"
    figure, axes = _beside_samples([int(client) for client in ids], counts, title, "similarity", once=True)
    _draw(figure, axes, weights[np.ix_(order, order)], "weight in the mean", highest=None)
    starts = np.flatnonzero(np.diff(ids)) + 1
    if len(starts) < _MOST_WITH_NUMBERS:
        for start in starts:
            axes.axhline(start - 0.5, color="white", lw=0.5)
            axes.axvline(start - 0.5, color="white", lw=0.5)
    places = [0, *starts.tolist()]
    shown = places[:: -(-len(places) // _MOST_IDS_BELOW)]
    axes.set_xticks(shown, [str(ids[place]) for place in shown], fontsize=6)
    axes.set_xlabel("client, in the same order")
    return figure


def _between_clients(weights: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """The weight that each client's experts give each client's, as the mean over the former; rows add up to 1."""
    clients, place, experts = np.unique(owners, return_inverse=True, return_counts=True)
    between = np.zeros((len(clients), len(clients)))
    np.add.at(between, (place[:, None], place[None, :]), weights)
    return between / experts[:, None]


def _similar_together(weights: np.ndarray, owners: np.ndarray) -> np.ndarray:
    """The clients in an order in which those that average their experts with one another are neighbours."""
    from scipy.cluster.hierarchy import leaves_list, linkage  # slow to import, and only needed here

    clients, between = np.unique(owners), _between_clients(weights, owners)
    between += between.T
    np.fill_diagonal(between, 0)
    if len(clients) < 3 or not between.any():
        return clients
    np.fill_diagonal(between, between.max(axis=1))  # so that clients who only average with each other are equal
    return clients[leaves_list(linkage(between, method="average", optimal_ordering=True))]


def _beside_samples(
    ids: Sequence[int], counts: Tensor, title: str, sorted_by: str, once: bool = False
) -> tuple[Figure, Axes]:
    """A figure with the samples of clients by class on the left, and empty axes with the same rows on the right.

    Without classes, there are only the empty axes.

    Args:
        ids: the client of each row, from top to bottom.
        counts: samples of each client and class, shape (all clients, classes).
        title: title of the figure.
        sorted_by: what the rows are sorted by.
        once: whether neighbouring rows of the same client have its id only once.
    """
    clients = len({*ids})
    figure = empty_figure(height=min(1.7 + max(0.085 * len(ids), 0.24 * min(len(ids), _MOST_WITH_NUMBERS)), 10.5))
    if counts.shape[1]:
        samples, axes = figure.subplots(1, 2, sharey=True, width_ratios=[2, 3])
        blues = samples.imshow(counts.numpy()[[*ids]], aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
        figure.colorbar(blues, ax=samples, location="bottom", fraction=0.04, pad=0.02, label="samples")
        _name_columns(samples, "class", counts.shape[1])
    else:
        samples = axes = figure.subplots()
    figure.suptitle(title, fontsize=10)
    samples.set_ylabel(f"{clients} clients, sorted by {sorted_by}")
    rows = [row for row, client in enumerate(ids) if not once or row == 0 or ids[row - 1] != client]
    if clients <= _MOST_NAMED:
        size = max(4.0, min(8.0, 72 * 0.75 * (figure.get_figheight() - 1.7) / len(rows)))
        samples.set_yticks(rows, [str(ids[row]) for row in rows], fontsize=size)
    else:
        samples.set_yticks([])
    return figure, axes


def _draw(figure: Figure, axes: Axes, values: np.ndarray, label: str, highest: float | None = 1.0) -> None:
    """Draws a map, whose colours begin at 0; cells that are nan are blank."""
    colormap = colormaps["viridis"].with_extremes(bad="white")
    masked = np.ma.masked_invalid(values)
    image = axes.imshow(masked, cmap=colormap, vmin=0.0, vmax=highest, aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=axes, location="bottom", fraction=0.04, pad=0.02, label=label)


def _name_columns(axes: Axes, label: str, number: int) -> None:
    axes.set_xlabel(label)
    axes.set_xticks(range(0, number, -(-number // _MOST_TICKS)))
