"""Figures of experts that clients exchange: who uses them, and which are averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmoe_pl.algorithms.fedmoe_da import aggregation_matrix
from fedmoe_pl.callbacks.figures import aggregation_figure, expert_usage_figure, figure_pixels
from fedmoe_pl.callbacks.tensorboard import method_tag, tensorboard_writers
from fedmoe_pl.rounds.evaluation import Evaluation
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ExpertMonitor(FederationCallback):
    """Shows in TensorBoard which experts are averaged together, and which experts each client uses.

    The aggregation matrix is drawn after the first round and at the end of a phase, if the server has one. The use of
    the experts is drawn at the end of a phase, if a gate chooses among experts none of which is global.
    """

    def on_round_end(self, run: Run, phase: Phase, round: int) -> None:
        """Draws the first matrix."""
        if round == 0:
            self._draw_matrix(run, phase)

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Draws the last matrix and the use of the experts."""
        self._draw_matrix(run, phase)
        if evaluation is None:
            return
        clients = evaluation.clients
        if any(client.gate_weights is not None and not client.has_global_expert for client in clients):
            _add_figure(run, f"experts/{method_tag(phase.name)}/used_by_client", expert_usage_figure(evaluation))

    def _draw_matrix(self, run: Run, phase: Phase) -> None:
        matrix = aggregation_matrix(run.states[phase.name].server)
        if matrix is not None:
            tag = f"experts/{method_tag(phase.name)}/aggregation_matrix"
            _add_figure(run, tag, aggregation_figure(*matrix, phase.name))


def _add_figure(run: Run, tag: str, figure: Figure) -> None:
    for writer in tensorboard_writers(run):
        writer.add_image(tag, figure_pixels(figure), run.step, dataformats="HWC")
