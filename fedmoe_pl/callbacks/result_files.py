"""The results and the partition of a run as files."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path

from lightning.pytorch.loggers import TensorBoardLogger

from fedmoe_pl.callbacks.figures import log_figure, partition_figure
from fedmoe_pl.data import FederatedDataModule, partition_rows, partition_table
from fedmoe_pl.evaluation.results import Evaluation, gate_rows
from fedmoe_pl.logs.summary import append_csv, format_table, summary_row, write_csv
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run


class ResultFiles(FederationCallback):
    """Writes the run's results as CSV files into its folder, and prints the table.

    ``rounds.csv``, ``clients.csv`` and ``summary.csv`` have the accuracies, ``partition.csv`` each client's number of
    samples of each class, and ``gate_weights.csv`` the mean weights of the clients' gates by class.

    Args:
        partition: whether to write ``partition.csv``.
        gate_weights: whether to write ``gate_weights.csv``, if a method has a trained gate.
    """

    def __init__(self, partition: bool = True, gate_weights: bool = True) -> None:
        self.partition = partition
        self.gate_weights = gate_weights

    def on_fit_start(self, run: Run) -> None:
        """Writes the partition. Other files are begun anew: a resumed run's may have more than its checkpoint."""
        self._written = 0
        if self.partition:
            write_csv(run.folder / "partition.csv", partition_rows(run.datamodule))
        self._write_results(run)
        self._write_rounds(run)

    def on_evaluation_end(self, run: Run, phase: Phase, evaluation: Evaluation) -> None:
        """Writes the rows of the rounds since the last evaluation."""
        self._write_rounds(run)

    def _write_rounds(self, run: Run) -> None:
        path = run.folder / "rounds.csv"
        new = run.rows[self._written :]
        if not new:  # evaluations after fewer epochs have no rows
            return
        if self._written and all(row.keys() <= self._columns.keys() for row in new):
            append_csv(path, [self._columns | row for row in new])
        else:  # methods may differ in their metrics, and a run may go on with others
            self._columns = dict.fromkeys((name for row in run.rows for name in row), math.nan)
            write_csv(path, run.rows)
        self._written = len(run.rows)

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Writes the results of all methods so far."""
        self._write_results(run)

    def _write_results(self, run: Run) -> None:
        results, gate_weights = run.results.values(), self.gate_weights
        tables = {
            "clients": [row for result in results for row in result.rows],
            "summary": [summary_row(result) for result in results],
            "gate_weights": [
                row for result in results if gate_weights for row in gate_rows(result, run.datamodule.num_classes)
            ],
        }
        for name, rows in tables.items():
            path = run.folder / f"{name}.csv"
            if rows:
                write_csv(path, rows)
            elif path.is_file():
                path.unlink()

    def on_fit_end(self, run: Run) -> None:
        """Prints the table, how often clients failed, and what shows the results."""
        if not run.results:
            return
        lines = [format_table(run.results.values())]
        if failed := {name: state.failed for name, state in run.states.items() if state.failed}:
            times = ", ".join(f"{name} {number}" for name, number in failed.items())
            lines.append(f"Clients that failed or dropped out, counted over all rounds: {times}.")
            lines.append("One that never trained is evaluated with the model that it began with.")
        lines.append(f"\nFiles: {run.folder}\nNext:  {shlex.join(['fedmoe', 'report', str(run.folder)])}")
        boards = [str(Path(each.log_dir)) for each in run.loggers.all if isinstance(each, TensorBoardLogger)]
        lines += [f"       {shlex.join(['tensorboard', '--logdir', folder])}" for folder in boards]
        encoding = getattr(sys.stdout, "encoding", None) or "utf-8"  # which may lack the letters of a name
        print("\n".join(["", *lines]).encode(encoding, "backslashreplace").decode(encoding), flush=True)


class PartitionMonitor(FederationCallback):
    """Shows in the run's loggers, before the first round, how many samples of each class each client has."""

    needs_clients = True

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
