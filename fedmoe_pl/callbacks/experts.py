"""Figures of experts that clients exchange: who uses them, and which are averaged."""

from __future__ import annotations

from fedmoe_pl.algorithms.fedmoe_da import aggregation_matrix
from fedmoe_pl.callbacks.figures import figure_pixels
from fedmoe_pl.callbacks.maps import aggregation_figure, expert_usage_figure
from fedmoe_pl.evaluation.evaluation import Evaluation
from fedmoe_pl.evaluation.gate_weights import expert_usage
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run

_MOST_EXPERTS = 20  # with a curve of its own each


class ExpertMonitor(FederationCallback):
    """Shows which experts each client uses, and which are averaged together.

    The use of the experts is shown if a gate chooses among experts none of which is global. After every evaluated
    round, every logger gets the share of a client's own samples that its gate sends to each expert, as the mean over
    the clients, such as ``used_experts/expert_2`` (the first 20). At the end of a phase, loggers that take pictures get
    the share of each client. The aggregation matrix is drawn after the first round and at the end of a phase, if the
    server has one.
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
        if evaluation is not None and run.loggers.take_images and _chooses(evaluation):
            pixels = figure_pixels(expert_usage_figure(evaluation, run.datamodule.class_counts()))
            run.loggers.log_image("used_experts/by_client", pixels, run.states[phase.name].round, phase.name)

    def _draw_matrix(self, run: Run, phase: Phase) -> None:
        matrix = aggregation_matrix(run.states[phase.name].server)
        if matrix is not None and run.loggers.take_images:
            pixels = figure_pixels(aggregation_figure(*matrix, phase.name, run.datamodule.class_counts()))
            run.loggers.log_image("used_experts/averaged_with", pixels, run.states[phase.name].round, phase.name)


def _chooses(evaluation: Evaluation) -> bool:
    """Whether a gate chooses among experts none of which is global."""
    return any(client.gate_weights is not None and not client.has_global_expert for client in evaluation.clients)
