"""Gate weights in the run's loggers: of samples, and of tokens in each layer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import numpy as np
import torch
from matplotlib.figure import Figure

from fedmoe_pl.callbacks.figures import (
    add_colorbar,
    beside_samples,
    draw_map,
    gate_figure,
    log_figure,
    new_figure,
    styled,
)
from fedmoe_pl.callbacks.sample_monitor import words_of
from fedmoe_pl.checks import check_at_least
from fedmoe_pl.evaluation.measure import pieces_of
from fedmoe_pl.evaluation.outputs import own_batch
from fedmoe_pl.evaluation.results import ClientEvaluation, Evaluation, gate_rows
from fedmoe_pl.models import LayerwiseAdapterMoE, TokenGate
from fedmoe_pl.models.inputs import Inputs, first_tensor, inputs_of, rows_of
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run

_MOST_EXPERTS = 20  # with a curve of its own each


class GateMonitor(FederationCallback):
    """Shows how each client's gate weighs the experts: the global one, 1, against the local one, 0, if there are such.

    After every evaluated round, every logger gets each expert's mean weight over the clients, such as
    ``mean_gate_weight/global`` or, where no expert is global, ``mean_gate_weight/expert_2`` (the first 20), and the
    standard deviation of the global weight over the clients. Loggers that take histograms get one of the clients' mean
    global weights. After the first evaluated round (or epoch) and at the end of a phase, they get one of the weights of
    each client's own samples, but not in a deployed federation, whose clients report means. At the end, loggers that
    take pictures get a heat map of the mean weight by client and class.

    Args:
        max_clients: number of clients, lowest ids first, that get a histogram of their weights.

    Raises:
        MisconfigurationException: if ``max_clients`` is below 0.
    """

    def __init__(self, max_clients: int = 50) -> None:
        check_at_least(self, "max_clients", max_clients, 0)
        self.max_clients = max_clients

    def on_evaluation_end(self, run: Run, phase: Phase, evaluation: Evaluation) -> None:
        """Logs the mean weights of all clients."""
        step = evaluation.step
        means = np.array([client.mean_gate_weight for client in evaluation.clients])
        means = means[~np.isnan(means)]
        scalars = {f"mean_gate_weight/{name}": weight for name, weight in mean_weights(evaluation.clients).items()}
        if len(means):
            scalars["mean_gate_weight/std_of_global"] = means.std().item()
        if scalars:
            run.loggers.log_scalars(evaluation.method, scalars, step)
        if len(means) and run.loggers.take_histograms:
            description = "Each client's mean weight of the global expert on its own samples: one count per client."
            run.loggers.log_histogram("mean_gate_weight/of_clients", means, description, step, evaluation.method)
            if _is_first_of_several(run, phase, evaluation):
                self._log_samples(run, evaluation)

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Logs the weights of single samples, and their means by client and class."""
        if evaluation is None or all(client.global_weights is None for client in evaluation.clients):
            return
        if run.loggers.take_histograms:
            self._log_samples(run, evaluation)
        if rows := [*gate_rows(evaluation, run.datamodule.num_classes)]:
            means = {client.client: client.mean_gate_weight for client in evaluation.clients}
            title = f"{evaluation.method}: mean weight of the global expert"
            draw = partial(gate_figure, rows, means, run.datamodule.class_counts().numpy(), title)
            log_figure(run, "mean_gate_weight/by_client_and_class", draw, evaluation.step, evaluation.method)

    def _log_samples(self, run: Run, evaluation: Evaluation) -> None:
        description = "Weight of the global expert on the client's own samples: one count per sample."
        weighed = [client for client in evaluation.clients if client.has_weights_of_samples]
        if len(weighed) > self.max_clients:
            description += f" The first {self.max_clients} of {len(weighed)} clients; max_clients shows others."
        for client in weighed[: self.max_clients]:
            if client.global_weights is not None:
                tag = f"weight_of_samples/{run.datamodule.client_names.file(client.client)}"
                weights = client.global_weights.detach().cpu().double().numpy()
                run.loggers.log_histogram(tag, weights, description, evaluation.step, evaluation.method)


def _is_first_of_several(run: Run, phase: Phase, evaluation: Evaluation) -> bool:
    """Whether others follow: TensorBoard's page Distributions shows nothing of a single histogram."""
    if evaluation.epochs is not None:
        return evaluation.epochs == 0
    first = next((row["round"] for row in run.rows if row["method"] == evaluation.method), None)
    return first == evaluation.round < phase.rounds


def mean_weights(clients: Iterable[ClientEvaluation]) -> dict[str, float]:
    """Each expert's weight, as the mean over the clients of their means over their own samples.

    Experts are called ``global`` and ``local`` if there is one of each, ``global_0``, ``global_1`` ... if several are
    global, and ``expert_0``, ``expert_1`` ... if none is.
    """
    of_experts: dict[str, list[float]] = {}
    for client in clients:
        if client.gate_weights is None:
            continue
        experts = client.gate_weights.shape[1]
        names = [f"expert_{expert}" for expert in range(experts)]
        if client.has_global_expert:
            several = experts > 2
            names = [*(f"global_{expert}" if several else "global" for expert in range(experts - 1)), "local"]
        means = client.gate_weights.detach().double().mean(dim=0).tolist()
        for name, mean in zip(names[:_MOST_EXPERTS], means, strict=False):
            of_experts.setdefault(name, []).append(mean)
    return {name: sum(means) / len(means) for name, means in of_experts.items()}


_MOST_NAMED = 24  # layers
_CHARACTER = 0.07  # inches that a character of a layer's label takes at most
_LABEL = "0 local expert, 1 global expert"


class TokenGateMonitor(FederationCallback):
    """Shows, at the end of a phase, where in a base and on which tokens a ``TokenGate`` uses the global expert.

    Loggers that take pictures get a heat map of its mean weight by client and layer, without padding, and one of its
    weight by token of the first client's first samples, as the mean over the layers that see every token. Samples are
    held-out ones, or training samples of a client that has none.

    Args:
        max_clients: number of clients, lowest ids first, that are shown.
        samples_per_client: the largest number of samples of each client; its first ones count.
        sentences: number of samples whose tokens are shown.

    Raises:
        MisconfigurationException: if a number is below 1.
    """

    needs_clients = True

    def __init__(self, max_clients: int = 50, samples_per_client: int = 100, sentences: int = 6) -> None:
        check_at_least(self, "max_clients", max_clients, 1)
        check_at_least(self, "samples_per_client", samples_per_client, 1)
        check_at_least(self, "sentences", sentences, 1)
        self.max_clients = max_clients
        self.samples_per_client = samples_per_client
        self.sentences = sentences

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Computes the weights and draws them."""
        if evaluation is None or not run.loggers.take_images:
            return
        module = run.module(phase)
        is_token_gate = isinstance(module, LayerwiseAdapterMoE) and isinstance(module.gate, TokenGate)
        if not (is_token_gate and module.has_global_expert):
            return
        clients = [client.client for client in evaluation.clients][: self.max_clients]
        means, tokens, ids = [], np.empty((0, 0)), torch.empty(0)
        for client, own in zip(clients, run.client_modules(phase.name, clients), strict=True):
            assert isinstance(own, LayerwiseAdapterMoE)
            batch = own_batch(run.datamodule, client, self.samples_per_client)[1]
            x = inputs_of(batch, own.target_key)
            by_layer = token_weights(own, x)
            means.append({path: float(np.nanmean(weights)) for path, weights in by_layer.items()})
            if client == clients[0]:
                most = max(weights.shape[1] for weights in by_layer.values())  # others come after pooling
                of_tokens = [weights for weights in by_layer.values() if weights.shape[1] == most]
                tokens = np.mean(of_tokens, axis=0)[: self.sentences]
                ids = first_tensor(x)[: self.sentences]
        title = f"{evaluation.method}: mean weight of the global expert"
        draw = partial(layer_figure, clients, means, title)
        log_figure(run, "token_gate/by_client_and_layer", draw, evaluation.step, evaluation.method)
        words = words_of(run.datamodule, ids) if tuple(ids.shape) == tokens.shape else None
        title = f"{evaluation.method}: client {run.datamodule.client_names[clients[0]]}, mean over layers"
        draw = partial(token_figure, tokens, words, title)
        log_figure(run, "token_gate/by_token", draw, evaluation.step, evaluation.method)


def token_weights(module: LayerwiseAdapterMoE, x: Inputs) -> dict[str, np.ndarray]:
    """The weights (B, T) of all but the last expert by the path of the layer; nan where a token is padding."""
    found: dict[str, list[np.ndarray]] = {}
    with torch.inference_mode():
        for piece in (rows_of(x, rows) for rows in pieces_of(module, x)):
            for path, of_layer in module.mix_layers(piece)[1].items():
                tokens = of_layer.reshape(len(of_layer), -1, of_layer.shape[-1])
                padding = module.mask_of(piece, tokens) == 0
                weights = tokens[..., :-1].sum(-1).masked_fill(padding, torch.nan)
                found.setdefault(path, []).append(weights.float().cpu().numpy())
    return {path: np.concatenate(weights) for path, weights in found.items()}


@styled
def layer_figure(clients: Sequence[int], means: Sequence[Mapping[str, float]], title: str) -> Figure:
    """The mean weight of the global expert by client (row) and layer (column, in the order of the base)."""
    paths = [*means[0]]
    start, labels = _without_common_start(paths)
    figure, (axes,) = beside_samples(clients, None, "", title)
    figure.set_figheight(figure.get_figheight() + _CHARACTER * max(map(len, labels)))  # labels stand upright
    values = np.array([[of_client[path] for path in paths] for of_client in means])
    image = draw_map(axes, values, f"layer of {start}" if start else "layer")
    shown = range(0, len(paths), -(-len(paths) // _MOST_NAMED))
    axes.set_xticks(shown, [labels[place] for place in shown], rotation=90)
    add_colorbar(figure, image, [axes], _LABEL)
    return figure


def _without_common_start(paths: Sequence[str]) -> tuple[str, list[str]]:
    """The module that has all layers, and their paths in it."""
    parts = [path.split(".") for path in paths]
    common = 0
    while all(len(path) > common + 1 and path[common] == parts[0][common] for path in parts):
        common += 1
    return ".".join(parts[0][:common]), [".".join(path[common:]) for path in parts]


@styled
def token_figure(weights: np.ndarray, words: list[list[str]] | None, title: str) -> Figure:
    """The weight of the global expert by sample (row) and token (column), with the words if they are known."""
    columns = np.flatnonzero(~np.isnan(weights).all(0))  # padding may be on the left
    shown = weights[:, columns]
    figure = new_figure(1.2 + (0.5 if words else 0.2) * len(shown))
    figure.suptitle(title)
    axes = figure.subplots()
    image = draw_map(axes, shown, "token")
    axes.set(ylabel="sample", yticks=range(len(shown)))
    for row, column in np.argwhere(~np.isnan(shown)) if words else ():
        color = "white" if shown[row, column] < 0.5 else "black"
        look = {"rotation": 90, "ha": "center", "va": "center", "fontsize": 4, "color": color, "clip_on": True}
        axes.text(column, row, words[row][columns[column]][:12] if words else "", **look)
    add_colorbar(figure, image, [axes], _LABEL)
    return figure
