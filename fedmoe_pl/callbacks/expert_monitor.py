"""Figures of experts that clients exchange: who uses them, and which are averaged."""

from __future__ import annotations

from functools import partial

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from fedmoe_pl.algorithms.fedmoe_da import aggregation_matrix
from fedmoe_pl.callbacks.figures import add_colorbar, beside_samples, draw_map, log_figure, styled
from fedmoe_pl.evaluation.results import Evaluation, expert_usage
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run

_MOST_EXPERTS = 20  # with a curve of its own each
_MOST_CLIENTS = 30  # whose experts are drawn one by one
_MOST_IDS_BELOW = 12  # ids of clients side by side, which may have three digits


class ExpertMonitor(FederationCallback):
    """Shows which experts each client uses, and which are averaged together.

    The use of the experts is shown if a gate chooses among experts none of which is global. After every evaluated
    round, every logger gets the share of a client's own samples that its gate sends to each expert, as the mean over
    the clients, such as ``used_experts/expert_2`` (the first 20). At the end of a phase, loggers that take pictures get
    the share of each client. Clients of a deployed federation report mean weights, which do not tell it. The
    aggregation matrix is drawn after the first round and at the end of a phase, if the server has one.
    """

    def on_evaluation_end(self, run: Run, phase: Phase, evaluation: Evaluation) -> None:
        """Logs the mean use of the experts."""
        if _chooses(evaluation):
            shares = expert_usage(evaluation).nanmean(dim=0)[:_MOST_EXPERTS].tolist()
            scalars = {f"used_experts/expert_{expert}": share for expert, share in enumerate(shares)}
            run.loggers.log_scalars(evaluation.method, scalars, evaluation.step)

    def on_server_update(self, run: Run, phase: Phase, round: int) -> None:
        """Draws the first matrix."""
        if round == 0:
            self._draw_matrix(run, phase)

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Draws the last matrix and the use of the experts."""
        self._draw_matrix(run, phase)
        if evaluation is not None and _chooses(evaluation):
            draw = partial(expert_usage_figure, evaluation, run.datamodule.class_counts().numpy())
            log_figure(run, "used_experts/by_client", draw, run.states[phase.name].round, phase.name)

    def _draw_matrix(self, run: Run, phase: Phase) -> None:
        matrix = aggregation_matrix(run.states[phase.name].server)
        if matrix is not None:
            draw = partial(aggregation_figure, *matrix, phase.name, run.datamodule.class_counts().numpy())
            log_figure(run, "used_experts/averaged_with", draw, run.states[phase.name].round, phase.name)


def _chooses(evaluation: Evaluation) -> bool:
    """Whether a gate is known to choose among experts none of which is global, for single samples."""
    return any(client.has_weights_of_samples and not client.has_global_expert for client in evaluation.clients)


@styled
def expert_usage_figure(evaluation: Evaluation, counts: np.ndarray) -> Figure:
    """Share of each client's own samples (row) that its gate sends to each expert (column), beside its samples."""
    shares = expert_usage(evaluation).numpy()
    known = np.nan_to_num(shares)
    order = np.lexsort((-known.max(axis=1), known.argmax(axis=1)))
    ids = [evaluation.clients[place].client for place in order]
    title = f"{evaluation.method}: which expert serves whom"
    figure, panels = beside_samples(ids, counts[ids], "most used expert", title)
    add_colorbar(figure, draw_map(panels[0], shares[order], "expert"), panels, "share of the client's own samples")
    return figure


@styled
def aggregation_figure(matrix: Tensor, owners: Tensor, method: str, counts: np.ndarray) -> Figure:
    """The weight that each expert (row) gives each expert (column) in its mean, beside its client's samples.

    Clients that average with one another are neighbours. Of more than 30, a cell is that of all experts of both.
    """
    weights, of_experts = matrix.numpy(), owners.numpy()
    clients = _similar_together(weights, of_experts)
    if len(clients) > _MOST_CLIENTS:
        weights, of_experts = _between_clients(weights, of_experts), np.unique(of_experts)
    order = np.concatenate([np.flatnonzero(of_experts == client) for client in clients])
    ids = of_experts[order]
    title = f"{method}: who is averaged with whom"
    figure, (axes,) = beside_samples(ids.tolist(), counts[ids], "similarity", title)
    image = draw_map(axes, weights[np.ix_(order, order)], "client, in the same order", highest=None)
    add_colorbar(figure, image, [axes], "weight in the mean")
    starts = np.flatnonzero(np.diff(ids)) + 1
    for start in starts if len(starts) < _MOST_CLIENTS else []:
        axes.axhline(start - 0.5, color="white", lw=0.5)
        axes.axvline(start - 0.5, color="white", lw=0.5)
    places = [0, *starts.tolist()]
    shown = places[:: -(-len(places) // _MOST_IDS_BELOW)]
    axes.set_xticks(shown, [str(ids[place]) for place in shown])
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
