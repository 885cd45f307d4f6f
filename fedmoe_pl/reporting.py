"""What a run shows and leaves behind: one progress bar, files in the run folder, TensorBoard."""

from __future__ import annotations

import math
import re
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
from lightning.pytorch.loggers import TensorBoardLogger
from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
from tensorboard.plugins.histogram.metadata import create_summary_metadata
from tensorboard.util.tensor_util import make_tensor_proto
from tqdm import tqdm

from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.data.partition_report import partition_figure, partition_table
from fedmoe_pl.evaluation import METRICS, Evaluation
from fedmoe_pl.figures import figure_pixels, gate_weight_figure, sorted_accuracy_figure
from fedmoe_pl.results import client_rows, format_table, percent, present_metrics, summary_row, write_csv

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from fedmoe_pl.federation import Federation, Phase

HISTOGRAM_BINS = 30
"""TensorBoard shows 30 bins, whatever is written."""


class ProgressBar(FederationCallback):
    """One bar on stderr for the whole run: phase, round, time left and the newest mean accuracies.

    Progress is counted in local epochs times clients (``Federation.completed_work`` of ``Federation.total_work``),
    so that a phase of 200 epochs in one round weighs what it costs. Where stderr is no terminal (a batch job, a log
    file) one short line per phase is written instead.
    """

    _bar: tqdm
    _start_time: float
    _start_work: float

    def on_fit_start(self, federation: Federation) -> None:
        """Opens the bar, at the work done so far if the run is resumed."""
        self._start_time = time.monotonic()
        self._start_work = federation.completed_work
        self._bar = tqdm(
            total=federation.total_work,
            initial=federation.completed_work,
            file=sys.stderr,
            disable=not sys.stderr.isatty(),
            dynamic_ncols=True,
            mininterval=0.5,
            # The time left follows the speed of the last ten seconds or, with slow clients, of the last 20 clients.
            smoothing=0.05,
            bar_format="{desc} {percentage:3.0f}%|{bar}| {elapsed}<{remaining}{postfix}",
        )

    def on_round_start(self, federation: Federation, phase: Phase, round: int) -> None:
        """Names phase and round."""
        self._bar.set_description_str(f"{phase.name} round {round + 1}/{phase.rounds}")

    def on_client_end(self, federation: Federation, phase: Phase, round: int, client: int) -> None:
        """Moves the bar to the work done so far."""
        self._bar.update(federation.completed_work - self._bar.n)

    def on_evaluation_end(self, federation: Federation, phase: Phase, evaluation: Evaluation) -> None:
        """Shows the newest accuracies."""
        self._bar.set_postfix_str(f"{evaluation.method}: {_accuracies(evaluation)}")

    def on_phase_end(self, federation: Federation, phase: Phase, evaluation: Evaluation | None) -> None:
        """Writes one line where there is no terminal."""
        if self._bar.disable:
            rounds = "1 round" if phase.rounds == 1 else f"{phase.rounds} rounds"
            accuracies = "" if evaluation is None else f", {_accuracies(evaluation)}"
            print(f"{self._time(federation)} {phase.name}: {rounds}{accuracies}", file=sys.stderr, flush=True)

    def on_fit_end(self, federation: Federation) -> None:
        """Leaves the full bar behind."""
        self._bar.close()

    def _time(self, federation: Federation) -> str:
        """Share done, elapsed and remaining time, as in the bar: ``[ 71% 02:10<00:53]``."""
        done, total = federation.completed_work, federation.total_work
        share = done / total if total else 1.0  # no work where every phase is read from a checkpoint
        elapsed = time.monotonic() - self._start_time
        work = done - self._start_work
        remaining = tqdm.format_interval(elapsed * (total - done) / work) if work else "?"
        return f"[{100 * share:3.0f}% {tqdm.format_interval(elapsed)}<{remaining}]"


def _accuracies(evaluation: Evaluation) -> str:
    local, overall = (percent(evaluation.spread(metric).mean) for metric in ("local_test", "global_test"))
    return f"local {local} %, global {overall} %"


class ResultFiles(FederationCallback):
    """Writes ``rounds.csv``, ``clients.csv``, ``summary.csv`` into the run folder and prints the table at the end."""

    def on_evaluation_end(self, federation: Federation, phase: Phase, evaluation: Evaluation) -> None:
        """Writes the rows of all rounds so far."""
        write_csv(federation.run_dir / "rounds.csv", federation.rows)

    def on_phase_end(self, federation: Federation, phase: Phase, evaluation: Evaluation | None) -> None:
        """Writes the results of all methods so far."""
        results = federation.results.values()
        if results:
            write_csv(federation.run_dir / "clients.csv", [row for result in results for row in client_rows(result)])
            write_csv(federation.run_dir / "summary.csv", [summary_row(result) for result in results])

    def on_fit_end(self, federation: Federation) -> None:
        """Prints the table."""
        if federation.results:
            print(f"\n{format_table(federation.results.values())}\n\nFiles: {federation.run_dir}", flush=True)


class AccuracyMonitor(FederationCallback):
    """Sends accuracies to the run's loggers.

    Every logger gets a scalar per evaluated round, such as ``FedAvg/global_test/mean``, over the number of rounds
    completed in the run, and what was sent and computed so far in the phase, such as ``FedAvg/traffic/bytes_up`` and
    ``FedAvg/flops``. TensorBoard also gets the accuracies of all clients as sorted curves, the table, and a page
    of hyperparameters with the final means over the clients.
    """

    def on_evaluation_end(self, federation: Federation, phase: Phase, evaluation: Evaluation) -> None:
        """Logs mean, standard deviation and worst tenth of each accuracy, as fractions, and the costs so far."""
        values = {
            f"{method_tag(evaluation.method)}/{metric}/{name}": value
            for metric in METRICS
            for name, value in evaluation.spread(metric)._asdict().items()
            if not math.isnan(value)
        }
        state = federation.states[phase.name]
        values |= {
            f"{method_tag(evaluation.method)}/traffic/{name}": float(value) for name, value in state.traffic.items()
        }
        if not math.isnan(state.flops):
            values[f"{method_tag(evaluation.method)}/flops"] = float(state.flops)
        for logger in federation.loggers:
            logger.log_metrics(values, step=federation.step)

    def on_phase_end(self, federation: Federation, phase: Phase, evaluation: Evaluation | None) -> None:
        """Draws the accuracies of all clients, of all methods so far."""
        if evaluation is not None:
            for writer in tensorboard_writers(federation):
                pixels = figure_pixels(sorted_accuracy_figure(federation.results.values()))
                writer.add_image("accuracy_of_all_clients/sorted", pixels, federation.step, dataformats="HWC")

    def on_fit_end(self, federation: Federation) -> None:
        """Logs the hyperparameters with the final accuracies."""
        results = federation.results.values()
        final = {
            f"final/{method_tag(e.method)}/{metric}": e.spread(metric).mean
            for e in results
            for metric in present_metrics([e])
        }
        hparams = flat_hparams(federation.hparams)
        for logger in federation.loggers:
            if isinstance(logger, TensorBoardLogger):  # the only one that takes metrics
                logger.log_hyperparams(hparams, metrics=final, step=federation.step)
            else:
                logger.log_metrics(final, step=federation.step)
                logger.log_hyperparams(hparams)
        if results:
            for writer in tensorboard_writers(federation):
                writer.add_text("table", _preformatted(format_table(results)), federation.step)
        for logger in federation.loggers:
            logger.save()


def flat_hparams(value: object, name: str = "") -> dict[str, object]:
    """A nested configuration as a flat one, with names short enough for a table; settings that are None are left out.

    Args:
        value: a configuration as LightningCLI parses it, of nested dicts and lists.
        name: the name under which ``value`` stands.

    Example:
        >>> gate = {"class_path": "FeatureGate", "init_args": {"hidden": 64, "bias": None}}
        >>> flat_hparams({"model": {"gate": gate}, "phases": [{"name": "FedAvg", "rounds": 9}], "seeds": [0, 1]})
        {'model/gate': 'FeatureGate', 'model/gate/hidden': 64, 'phases/FedAvg/rounds': 9, 'seeds': [0, 1]}
    """
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        names = [str(item.get("name", i)) for i, item in enumerate(value)]
        value = {n: {k: v for k, v in item.items() if k != "name"} for n, item in zip(names, value, strict=True)}
    if not isinstance(value, dict):
        return {} if value is None else {name: value}
    flat = {}
    for key, item in value.items():
        flat |= flat_hparams(item, name if key in ("class_path", "init_args") else f"{name}/{key}".lstrip("/"))
    return flat


class GateMonitor(FederationCallback):
    """Shows in TensorBoard how each client's gate weighs the global expert, 1, against the local expert, 0.

    After every evaluated round the clients' mean weights, as a histogram over clients (and as scalars in every
    logger); at the end of a phase the weights of each client's own samples, as a histogram per client, and a picture
    of the mean weight by client and class.

    Args:
        max_clients: number of clients, lowest ids first, that get a histogram of their own.
    """

    def __init__(self, max_clients: int = 50) -> None:
        self.max_clients = max_clients

    def on_evaluation_end(self, federation: Federation, phase: Phase, evaluation: Evaluation) -> None:
        """Logs the mean weights of all clients."""
        means = np.array([client.mean_gate_weight for client in evaluation.clients])
        means = means[~np.isnan(means)]
        if not len(means):
            return
        scalars = {
            f"{method_tag(evaluation.method)}/mean_gate_weight/mean": means.mean().item(),
            f"{method_tag(evaluation.method)}/mean_gate_weight/std": means.std().item(),
        }
        for logger in federation.loggers:
            logger.log_metrics(scalars, step=federation.step)
        summary = _histogram(
            f"mean_gate_weight/{method_tag(evaluation.method)}/over_clients",
            means,
            "Each client's mean weight of the global expert on its own samples: one count per client.",
        )
        for writer in tensorboard_writers(federation):
            _add_summary(writer, summary, federation.step)

    def on_phase_end(self, federation: Federation, phase: Phase, evaluation: Evaluation | None) -> None:
        """Logs the weights of single samples, and their means by client and class."""
        if evaluation is None or all(client.global_weights is None for client in evaluation.clients):
            return
        for writer in tensorboard_writers(federation):
            for client in evaluation.clients[: self.max_clients]:
                if client.global_weights is not None:
                    tag = f"gate_weights/{method_tag(evaluation.method)}/client_{client.client:03d}"
                    weights = client.global_weights.detach().cpu().double().numpy()
                    description = "Weight of the global expert on the client's own samples: one count per sample."
                    _add_summary(writer, _histogram(tag, weights, description), federation.step)
            pixels = figure_pixels(gate_weight_figure(evaluation, federation.datamodule.num_classes))
            tag = f"gate_weights/{method_tag(evaluation.method)}/by_client_and_class"
            writer.add_image(tag, pixels, federation.step, dataformats="HWC")


class PartitionMonitor(FederationCallback):
    """Shows in TensorBoard, before the first round, which client holds how much of which class."""

    def on_fit_start(self, federation: Federation) -> None:
        """Draws the partition and writes it as a table."""
        if federation.step:
            return  # a resumed run has shown it
        for writer in tensorboard_writers(federation):
            pixels = figure_pixels(partition_figure(federation.datamodule))
            writer.add_image("partition", pixels, federation.step, dataformats="HWC")
            writer.add_text("partition", _preformatted(partition_table(federation.datamodule)), federation.step)


def tensorboard_writers(federation: Federation) -> list[SummaryWriter]:
    """What writes into the run's TensorBoard; none where it has no such logger."""
    return [logger.experiment for logger in federation.loggers if isinstance(logger, TensorBoardLogger)]


def method_tag(method: str) -> str:
    """The method's name as part of a tag, with the characters that TensorBoard would replace already replaced."""
    return re.sub(r"[^-/\w.]", "_", method)


def _preformatted(text: str) -> str:
    """Markdown that keeps spaces and line breaks."""
    return f"```\n{text}\n```"


def _histogram(tag: str, weights: np.ndarray, description: str) -> Summary:
    """A histogram whose axis is 0 to 1 for all clients.

    ``SummaryWriter.add_histogram`` drops empty bins at the ends, which gives every client an axis of its own.
    """
    counts, edges = np.histogram(weights, bins=HISTOGRAM_BINS, range=(0.0, 1.0))
    buckets = np.stack([edges[:-1], edges[1:], counts], axis=1)  # (bins, 3): left, right, count
    metadata = create_summary_metadata(display_name=None, description=description)
    return Summary(value=[Summary.Value(tag=tag, metadata=metadata, tensor=make_tensor_proto(buckets, np.float64))])


def _add_summary(writer: SummaryWriter, summary: Summary, step: int) -> None:
    if writer.file_writer is not None:
        writer.file_writer.add_summary(summary, step)
