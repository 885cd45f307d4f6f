"""Figures of experts that clients exchange: who uses them, and which are averaged."""

from __future__ import annotations

from fedmoe_pl.algorithms.fedmoe_da import aggregation_matrix
from fedmoe_pl.callbacks.figures import figure_pixels
from fedmoe_pl.callbacks.maps import aggregation_figure, expert_usage_figure
from fedmoe_pl.rounds.evaluation import Evaluation
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run


class ExpertMonitor(FederationCallback):
    """Shows which experts are averaged together, and which experts each client uses.

    The pictures go to loggers that take them. The aggregation matrix is drawn after the first round and at the end of a
    phase, if the server has one. The use of the experts is drawn at the end of a phase, if a gate chooses among experts
    none of which is global.
    """

    def on_round_end(self, run: Run, phase: Phase, round: int) -> None:
        """Draws the first matrix."""
        if round == 0:
            self._draw_matrix(run, phase)

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Draws the last matrix and the use of the experts."""
        self._draw_matrix(run, phase)
        clients = evaluation.clients if evaluation is not None and run.boards.take_images else []
        if evaluation is not None and any(c.gate_weights is not None and not c.has_global_expert for c in clients):
            pixels = figure_pixels(expert_usage_figure(evaluation, run.datamodule.class_counts()))
            run.boards.log_image("experts/used_by_client", pixels, run.states[phase.name].round, phase.name)

    def _draw_matrix(self, run: Run, phase: Phase) -> None:
        matrix = aggregation_matrix(run.states[phase.name].server)
        if matrix is not None and run.boards.take_images:
            pixels = figure_pixels(aggregation_figure(*matrix, phase.name, run.datamodule.class_counts()))
            run.boards.log_image("experts/averaged_with", pixels, run.states[phase.name].round, phase.name)
