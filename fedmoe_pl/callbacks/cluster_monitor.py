"""The clusters that clients pick."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from fedmoe_pl.algorithms.ifca import cluster_picks
from fedmoe_pl.algorithms.shared.clusters import cluster_in_use
from fedmoe_pl.callbacks.figures import beside_samples, draw_map, log_figure, new_figure, styled
from fedmoe_pl.evaluation.results import Evaluation
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run

_MOST_CLIENTS = 200  # of whom is computed which cluster they use: as costly as an evaluation on their training samples


class ClusterMonitor(FederationCallback):
    """Shows how many clients picked each cluster, in phases in which clients pick one (``EpsilonGreedyIFCA``).

    Every logger gets a scalar per round and cluster, such as ``picked/cluster_0`` of the method IFCA. At the end of the
    phase, loggers that take pictures get one of all rounds, and one of the cluster whose model each client uses then
    (the first 200 clients), beside the clients' samples. The server of a deployed federation cannot draw the latter.

    Args:
        by_client: whether to draw the cluster of each client.
    """

    def __init__(self, by_client: bool = True) -> None:
        self.by_client = by_client

    def on_server_update(self, run: Run, phase: Phase, round: int) -> None:
        """Logs the picks of the round."""
        picks = cluster_picks(run.states[phase.name].server)
        if picks is not None:
            scalars = {f"picked/cluster_{cluster}": number for cluster, number in enumerate(picks[-1].tolist())}
            run.loggers.log_scalars(phase.name, scalars, run.states[phase.name].round)

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Draws the picks of all rounds that led to the result, and the clusters of the clients."""
        state = run.states[phase.name]
        picks = cluster_picks(state.server)
        if picks is None or not len(picks) or not run.loggers.take_images:
            return
        log_figure(run, "picked/all_rounds", partial(_picks_figure, phase.name, picks), state.round, phase.name)
        if evaluation is None or not self.by_client:
            return
        clients = [client.client for client in evaluation.clients[:_MOST_CLIENTS]]
        modules = run.client_modules(evaluation.method, clients)
        clusters = zip(clients, (cluster_in_use(module, state.server) for module in modules), strict=True)
        known = {client: cluster for client, cluster in clusters if cluster is not None}
        if known:
            counts = run.datamodule.class_counts().numpy()
            draw = partial(cluster_figure, phase.name, known, picks.shape[1], counts)
            log_figure(run, "picked/by_client", draw, state.round, phase.name)


@styled
def _picks_figure(method: str, picks: Tensor) -> Figure:
    """How many clients picked each cluster (row) in each round (column), from shape (rounds, clusters)."""
    figure = new_figure(height=min(1.2 + 0.2 * picks.shape[1], 6.0))
    axes = figure.subplots()
    edges = (0.5, len(picks) + 0.5, picks.shape[1] - 0.5, -0.5)  # rounds count from 1, clusters from 0
    image = axes.imshow(picks.T.numpy(), vmin=0, aspect="auto", interpolation="nearest", extent=edges)
    figure.colorbar(image, fraction=0.06, label="clients")
    axes.set(xlabel="round", ylabel="cluster", title=f"{method}: how many clients picked each cluster")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_yticks(range(picks.shape[1]))
    return figure


@styled
def cluster_figure(method: str, clusters: Mapping[int, int], num_clusters: int, counts: np.ndarray) -> Figure:
    """The cluster (column) whose model each client (row) uses, beside the clients' samples."""
    largest = counts.argmax(axis=1) if counts.shape[1] else np.zeros(len(counts))
    ids = sorted(clusters, key=lambda client: (clusters[client], largest[client], client))
    is_own = np.array([[float(clusters[client] == cluster) for cluster in range(num_clusters)] for client in ids])
    title = f"{method}: which cluster's model serves whom"
    figure, (axes,) = beside_samples(ids, counts[ids], "cluster", title)
    draw_map(axes, is_own, "cluster", "Greens", 1.4)
    return figure
