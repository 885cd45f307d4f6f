"""The clusters that clients pick."""

from __future__ import annotations

from fedmoe_pl.algorithms.ifca import cluster_picks
from fedmoe_pl.callbacks.figures import cluster_picks_figure, figure_pixels
from fedmoe_pl.rounds.evaluation import Evaluation
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run


class ClusterMonitor(FederationCallback):
    """Shows how many clients picked each cluster, in phases in which clients pick one (``EpsilonGreedyIFCA``).

    Every logger gets a scalar per round and cluster, such as ``picked/cluster_0`` of the method IFCA; loggers that take
    pictures get one of all rounds at the end of the phase.
    """

    def on_round_end(self, run: Run, phase: Phase, round: int) -> None:
        """Logs the picks of the round."""
        picks = cluster_picks(run.states[phase.name].server)
        if picks is not None:
            scalars = {f"picked/cluster_{cluster}": number for cluster, number in enumerate(picks[-1].tolist())}
            run.boards.log_scalars(phase.name, scalars, run.states[phase.name].round)

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Draws the picks of all rounds that led to the result."""
        picks = cluster_picks(run.states[phase.name].server)
        if picks is not None and len(picks) and run.boards.take_images:
            pixels = figure_pixels(cluster_picks_figure(phase.name, picks))
            run.boards.log_image("picked/all_rounds", pixels, run.states[phase.name].round, phase.name)
