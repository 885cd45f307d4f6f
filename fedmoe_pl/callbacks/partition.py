"""The partition of the data, in TensorBoard."""

from __future__ import annotations

from fedmoe_pl.callbacks.figures import figure_pixels
from fedmoe_pl.callbacks.tensorboard import preformatted, tensorboard_writers
from fedmoe_pl.data import partition_figure, partition_table
from fedmoe_pl.rounds.run import FederationCallback, Run


class PartitionMonitor(FederationCallback):
    """Shows in TensorBoard, before the first round, how many samples of each class each client has."""

    def on_fit_start(self, run: Run) -> None:
        """Draws the partition and writes it as a table."""
        if run.step:
            return  # a resumed run has already shown it
        for writer in tensorboard_writers(run):
            pixels = figure_pixels(partition_figure(run.datamodule))
            writer.add_image("partition", pixels, run.step, dataformats="HWC")
            writer.add_text("partition", preformatted(partition_table(run.datamodule)), run.step)
