"""Gate weights in TensorBoard."""

from __future__ import annotations

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.callbacks.figures import figure_pixels, gate_weight_figure
from fedmoe_pl.callbacks.tensorboard import add_summary, histogram, method_tag, tensorboard_writers
from fedmoe_pl.checks import check_at_least
from fedmoe_pl.rounds.evaluation import Evaluation
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run


class GateMonitor(FederationCallback):
    """Shows in TensorBoard how each client's gate weighs the global expert, 1, against the local expert, 0.

    After every evaluated round, it shows a histogram of the clients' mean weights, whose mean and standard deviation go
    to every logger. At the end of a phase, it shows a histogram of the weights of each client's own samples, and a
    figure of the mean weight by client and class.

    Args:
        max_clients: number of clients, lowest ids first, that get a histogram of their weights, which needs a
            TensorBoard logger; None means 50.

    Raises:
        MisconfigurationException: if ``max_clients`` is below 0.
    """

    def __init__(self, max_clients: int | None = None) -> None:
        check_at_least(self, "max_clients", max_clients, 0)
        self.max_clients = max_clients

    def on_fit_start(self, run: Run) -> None:
        """Refuses ``max_clients`` without a TensorBoard logger.

        Raises:
            MisconfigurationException: if there is none.
        """
        if self.max_clients is not None and not tensorboard_writers(run):
            raise MisconfigurationException(
                f"GateMonitor: max_clients is {self.max_clients}, but must be left out without a TensorBoard logger."
            )

    def on_evaluation_end(self, run: Run, phase: Phase, evaluation: Evaluation) -> None:
        """Logs the mean weights of all clients."""
        means = np.array([client.mean_gate_weight for client in evaluation.clients])
        means = means[~np.isnan(means)]
        if not len(means):
            return
        scalars = {
            f"{method_tag(evaluation.method)}/mean_gate_weight/mean": means.mean().item(),
            f"{method_tag(evaluation.method)}/mean_gate_weight/std": means.std().item(),
        }
        for logger in run.loggers:
            logger.log_metrics(scalars, step=run.step)
        summary = histogram(
            f"mean_gate_weight/{method_tag(evaluation.method)}/over_clients",
            means,
            "Each client's mean weight of the global expert on its own samples: one count per client.",
        )
        for writer in tensorboard_writers(run):
            add_summary(writer, summary, run.step)

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Logs the weights of single samples, and their means by client and class."""
        if evaluation is None or all(client.global_weights is None for client in evaluation.clients):
            return
        for writer in tensorboard_writers(run):
            for client in evaluation.clients[: 50 if self.max_clients is None else self.max_clients]:
                if client.global_weights is not None:
                    tag = f"gate_weights/{method_tag(evaluation.method)}/client_{client.client:03d}"
                    weights = client.global_weights.detach().cpu().double().numpy()
                    description = "Weight of the global expert on the client's own samples: one count per sample."
                    add_summary(writer, histogram(tag, weights, description), run.step)
            pixels = figure_pixels(gate_weight_figure(evaluation, run.datamodule.num_classes))
            tag = f"gate_weights/{method_tag(evaluation.method)}/by_client_and_class"
            writer.add_image(tag, pixels, run.step, dataformats="HWC")
