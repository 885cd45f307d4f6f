"""Which clusters the clients of a federation picked."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from lightning.pytorch.loggers import TensorBoardLogger

from fedmoe_pl.algorithms.ifca import PICKS
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.figures import cluster_picks_figure, figure_pixels

if TYPE_CHECKING:
    from fedmoe_pl.evaluation import Evaluation
    from fedmoe_pl.federation import Federation, Phase


class ClusterMonitor(FederationCallback):
    """Shows how many clients picked each cluster, in phases in which they do (``EpsilonGreedyIFCA``).

    Every logger gets a scalar per round and cluster, such as ``clusters/IFCA/picked_0``; TensorBoard gets a picture of
    all rounds at the end of the phase.
    """

    def on_round_end(self, federation: Federation, phase: Phase, round: int) -> None:
        """Logs the picks of the round."""
        server = federation.states[phase.name].server
        if PICKS in server:
            picks = server[PICKS][-1].tolist()
            scalars = {f"{_tag(phase)}/picked_{cluster}": float(number) for cluster, number in enumerate(picks)}
            for logger in federation.loggers:
                logger.log_metrics(scalars, step=federation.step)

    def on_phase_end(self, federation: Federation, phase: Phase, evaluation: Evaluation | None) -> None:
        """Draws the picks of all rounds up to the result."""
        server = federation.states[phase.name].server
        if PICKS in server and len(server[PICKS]):
            for logger in federation.loggers:
                if isinstance(logger, TensorBoardLogger):
                    pixels = figure_pixels(cluster_picks_figure(phase.name, server[PICKS]))
                    logger.experiment.add_image(f"{_tag(phase)}/picks", pixels, federation.step, dataformats="HWC")


def _tag(phase: Phase) -> str:
    """The beginning of the phase's tags, with the characters that TensorBoard would replace already replaced."""
    return "clusters/" + re.sub(r"[^-/\w.]", "_", phase.name)
