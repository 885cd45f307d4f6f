"""The partition of the data, in the run's loggers and as a picture."""

from __future__ import annotations

from pathlib import Path

from fedmoe_pl.callbacks.figures import log_figure, partition_figure
from fedmoe_pl.data import FederatedDataModule, partition_rows, partition_table
from fedmoe_pl.rounds.run import FederationCallback, Run


class PartitionMonitor(FederationCallback):
    """Shows in the run's loggers, before the first round, how many samples of each class each client has."""

    def on_fit_start(self, run: Run) -> None:
        """Draws the partition and writes it as a table, unless the run is resumed."""
        if not run.step and run.loggers.take_images:
            log_figure(run, "partition", lambda: partition_figure([*partition_rows(run.datamodule)]), run.step)
            run.loggers.log_text("partition", partition_table(run.datamodule), run.step)


def write_partition(datamodule: FederatedDataModule, path: Path) -> str:
    """Draws the partition to a file, whose folder is made if it is missing, and returns it as a text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partition_figure([*partition_rows(datamodule)]).savefig(path, dpi=200, facecolor="white")
    return f"{partition_table(datamodule)}\n\nPicture: {path}"
