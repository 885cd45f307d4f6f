"""The partition of the data, in the run's loggers."""

from __future__ import annotations

from fedmoe_pl.callbacks.figures import figure_pixels
from fedmoe_pl.data import partition_figure, partition_table
from fedmoe_pl.rounds.run import FederationCallback, Run


class PartitionMonitor(FederationCallback):
    """Shows in the run's loggers, before the first round, how many samples of each class each client has."""

    def on_fit_start(self, run: Run) -> None:
        """Draws the partition and writes it as a table."""
        if run.step:
            return  # a resumed run has already shown it
        if run.loggers.take_images:
            run.loggers.log_image("partition", figure_pixels(partition_figure(run.datamodule)), run.step)
            run.loggers.log_text("partition", partition_table(run.datamodule), run.step)
