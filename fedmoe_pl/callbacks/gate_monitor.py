"""Gate weights in the run's loggers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import numpy as np

from fedmoe_pl.callbacks.figures import gate_figure, log_figure
from fedmoe_pl.checks import check_at_least
from fedmoe_pl.evaluation.evaluation import ClientEvaluation, Evaluation, gate_rows
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run

_MOST_EXPERTS = 20  # with a curve of its own each


class GateMonitor(FederationCallback):
    """Shows how each client's gate weighs the experts: the global one, 1, against the local one, 0, if there are such.

    After every evaluated round, every logger gets each expert's mean weight over the clients, such as
    ``mean_gate_weight/global`` or, where no expert is global, ``mean_gate_weight/expert_2`` (the first 20), and the
    standard deviation of the global weight over the clients. Loggers that take histograms get one of the clients' mean
    global weights. After the first evaluated round (or epoch) and at the end of a phase, they get one of the weights of
    each client's own samples. At the end, loggers that take pictures get a heat map of the mean weight by client and
    class.

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
        weighed = [client for client in evaluation.clients if client.global_weights is not None]
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
