"""Pictures of experts that no client or server owns alone: who uses them, and which are averaged."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmoe_pl.algorithms.fedmoe_da import aggregation_matrix
from fedmoe_pl.callbacks.callback import FederationCallback
from fedmoe_pl.callbacks.figures import aggregation_figure, expert_usage_figure, figure_pixels
from fedmoe_pl.callbacks.tensorboard import method_tag, tensorboard_writers
from fedmoe_pl.rounds.evaluation import Evaluation

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedmoe_pl.federation import Federation, Phase


class ExpertMonitor(FederationCallback):
    """Shows in TensorBoard which experts are averaged with which, and which of a client's experts serve its samples.

    The aggregation matrix of the first round and of the end of a phase, where the server has one; the use of the
    experts at the end of a phase, where a gate chooses among experts that are alike.
    """

    def on_round_end(self, federation: Federation, phase: Phase, round: int) -> None:
        """Draws the first matrix."""
        if round == 0:
            self._draw_matrix(federation, phase)

    def on_phase_end(self, federation: Federation, phase: Phase, evaluation: Evaluation | None) -> None:
        """Draws the last matrix and the use of the experts."""
        self._draw_matrix(federation, phase)
        if evaluation is None:
            return
        clients = evaluation.clients
        if any(client.gate_weights is not None and not client.has_global_expert for client in clients):
            _add_figure(federation, f"experts/{method_tag(phase.name)}/used_by_client", expert_usage_figure(evaluation))

    def _draw_matrix(self, federation: Federation, phase: Phase) -> None:
        found = aggregation_matrix(federation.states[phase.name].server)
        if found is not None:
            tag = f"experts/{method_tag(phase.name)}/aggregation_matrix"
            _add_figure(federation, tag, aggregation_figure(*found, phase.name))


def _add_figure(federation: Federation, tag: str, figure: Figure) -> None:
    for writer in tensorboard_writers(federation):
        writer.add_image(tag, figure_pixels(figure), federation.step, dataformats="HWC")
