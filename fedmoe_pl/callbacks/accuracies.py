"""Accuracies, costs and hyperparameters in the run's loggers."""

from __future__ import annotations

import math

from lightning.pytorch.loggers import TensorBoardLogger

from fedmoe_pl.callbacks.figures import figure_pixels, sorted_accuracy_figure
from fedmoe_pl.callbacks.tensorboard import method_tag, preformatted, tensorboard_writers
from fedmoe_pl.rounds.evaluation import METRICS, Evaluation
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.results import format_table, present_metrics
from fedmoe_pl.rounds.run import FederationCallback, Run


class AccuracyMonitor(FederationCallback):
    """Sends accuracies to the run's loggers.

    In every evaluated round, every logger gets scalars of the accuracies, such as ``FedAvg/global_test/mean``, and of
    the phase's costs so far, such as ``FedAvg/traffic/bytes_up`` and ``FedAvg/flops``. Their step is the number of
    rounds completed in the run. TensorBoard also gets sorted curves of all clients' accuracies, the table, and a page
    of hyperparameters with the final means over the clients.
    """

    def on_evaluation_end(self, run: Run, phase: Phase, evaluation: Evaluation) -> None:
        """Logs mean, standard deviation and worst tenth of each accuracy, as fractions, and the costs so far."""
        values = {
            f"{method_tag(evaluation.method)}/{metric}/{name}": value
            for metric in METRICS
            for name, value in evaluation.spread(metric)._asdict().items()
            if not math.isnan(value)
        }
        state = run.states[phase.name]
        values |= {
            f"{method_tag(evaluation.method)}/traffic/{name}": float(value) for name, value in state.traffic.items()
        }
        if not math.isnan(state.flops):
            values[f"{method_tag(evaluation.method)}/flops"] = float(state.flops)
        if not math.isnan(state.epsilon):
            values[f"{method_tag(evaluation.method)}/epsilon"] = state.epsilon
        for logger in run.loggers:
            logger.log_metrics(values, step=run.step)

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Draws the accuracies of all clients for all methods so far."""
        if evaluation is not None:
            for writer in tensorboard_writers(run):
                pixels = figure_pixels(sorted_accuracy_figure(run.results.values()))
                writer.add_image("accuracy_of_all_clients/sorted", pixels, run.step, dataformats="HWC")

    def on_fit_end(self, run: Run) -> None:
        """Logs the hyperparameters with the final accuracies."""
        results = run.results.values()
        final = {
            f"final/{method_tag(e.method)}/{metric}": e.spread(metric).mean
            for e in results
            for metric in present_metrics([e])
        }
        hparams = flat_hparams(run.hparams)
        for logger in run.loggers:
            if isinstance(logger, TensorBoardLogger):  # the only one that takes metrics
                logger.log_hyperparams(hparams, metrics=final, step=run.step)
            else:
                logger.log_metrics(final, step=run.step)
                logger.log_hyperparams(hparams)
        if results:
            for writer in tensorboard_writers(run):
                writer.add_text("table", preformatted(format_table(results)), run.step)
        for logger in run.loggers:
            logger.save()


def flat_hparams(value: object, name: str = "") -> dict[str, object]:
    """Flattens a nested configuration, with names short enough for a table; settings that are None are left out.

    Args:
        value: a configuration as LightningCLI parses it, of nested dicts and lists.
        name: the name of ``value`` in the configuration.

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
