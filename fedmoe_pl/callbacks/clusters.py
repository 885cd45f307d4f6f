"""Which clusters the clients of a federation picked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmoe_pl.algorithms.ifca import cluster_picks
from fedmoe_pl.callbacks.callback import FederationCallback
from fedmoe_pl.callbacks.figures import cluster_picks_figure, figure_pixels
from fedmoe_pl.callbacks.tensorboard import method_tag, tensorboard_writers

if TYPE_CHECKING:
    from fedmoe_pl.federation import Federation, Phase
    from fedmoe_pl.rounds.evaluation import Evaluation


class ClusterMonitor(FederationCallback):
    """Shows how many clients picked each cluster, in phases in which they do (``EpsilonGreedyIFCA``).

    Every logger gets a scalar per round and cluster, such as ``clusters/IFCA/picked_0``; TensorBoard gets a picture of
    all rounds at the end of the phase.
    """

    def on_round_end(self, federation: Federation, phase: Phase, round: int) -> None:
        """Logs the picks of the round."""
        picks = cluster_picks(federation.states[phase.name].server)
        if picks is not None:
            tag = f"clusters/{method_tag(phase.name)}/picked"
            scalars = {f"{tag}_{cluster}": float(number) for cluster, number in enumerate(picks[-1].tolist())}
            for logger in federation.loggers:
                logger.log_metrics(scalars, step=federation.step)

    def on_phase_end(self, federation: Federation, phase: Phase, evaluation: Evaluation | None) -> None:
        """Draws the picks of all rounds up to the result."""
        picks = cluster_picks(federation.states[phase.name].server)
        if picks is not None and len(picks):
            pixels = figure_pixels(cluster_picks_figure(phase.name, picks))
            for writer in tensorboard_writers(federation):
                tag = f"clusters/{method_tag(phase.name)}/picks"
                writer.add_image(tag, pixels, federation.step, dataformats="HWC")
