"""Who holds which data, in TensorBoard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedmoe_pl.callbacks.callback import FederationCallback
from fedmoe_pl.callbacks.figures import figure_pixels
from fedmoe_pl.callbacks.tensorboard import preformatted, tensorboard_writers
from fedmoe_pl.data import partition_figure, partition_table

if TYPE_CHECKING:
    from fedmoe_pl.federation import Federation


class PartitionMonitor(FederationCallback):
    """Shows in TensorBoard, before the first round, which client holds how much of which class."""

    def on_fit_start(self, federation: Federation) -> None:
        """Draws the partition and writes it as a table."""
        if federation.step:
            return  # a resumed run has shown it
        for writer in tensorboard_writers(federation):
            pixels = figure_pixels(partition_figure(federation.datamodule))
            writer.add_image("partition", pixels, federation.step, dataformats="HWC")
            writer.add_text("partition", preformatted(partition_table(federation.datamodule)), federation.step)
