"""Accuracies, costs and hyperparameters in the run's loggers."""

from __future__ import annotations

import math

from fedmoe_pl.callbacks.figures import figure_pixels, sorted_accuracy_figure
from fedmoe_pl.callbacks.hparams import method_hparams, run_hparams
from fedmoe_pl.evaluation.evaluation import Evaluation
from fedmoe_pl.logs.summary import format_table, present_metrics
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run


class AccuracyMonitor(FederationCallback):
    """Sends accuracies and other metrics to the run's loggers.

    In every evaluated round, every logger gets the method's accuracies, such as ``local_test/mean``, and what the phase
    has cost so far, such as ``resources/bytes_up`` and ``resources/flops``. The step is the number of the phase's
    completed rounds or, with ``Evaluate.every_n_epochs``, epochs. In TensorBoard, each method is a run with these
    tags; in other loggers the method's name comes first: ``FedAvg/local_test/mean``. Loggers that take pictures get
    sorted curves of all clients' accuracies. At the end of a phase, the final means over the clients are logged, in
    TensorBoard as a row of the page HParams. The other loggers get the hyperparameters before the first round.
    """

    def on_fit_start(self, run: Run) -> None:
        """Logs the hyperparameters, so that a logger that cannot take them fails before any training."""
        run.loggers.log_hparams(run_hparams(run.configuration, run.seed))

    def on_evaluation_end(self, run: Run, phase: Phase, evaluation: Evaluation) -> None:
        """Logs mean, standard deviation and worst tenth of each accuracy, a fraction, and metric, and the costs."""
        values = {
            f"{metric}/{name}": value
            for metric in evaluation.metrics
            for name, value in evaluation.spread_or_nan(metric)._asdict().items()
            if not math.isnan(value)
        }
        state = run.states[phase.name]
        costs = {**state.traffic, "flops": state.flops, "epsilon": state.epsilon} if state.round else {}
        values |= {f"resources/{name}": float(value) for name, value in costs.items() if not math.isnan(value)}
        run.loggers.log_scalars(evaluation.method, values, evaluation.step)

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Logs the phase's final accuracies, and draws those of all clients for all methods so far."""
        of_phases = method_hparams(run.configuration, run.seed)
        for final in run.states[phase.name].evaluations:
            means = {metric: final.spread(metric).mean for metric in present_metrics([final])}
            hparams = {"method": final.method, **of_phases.get(phase.name, {})}
            run.loggers.log_result(final.method, hparams, means, final.step, of_phases.values())
        if evaluation is not None and run.loggers.take_images:
            pixels = figure_pixels(sorted_accuracy_figure(run.results.values()))
            run.loggers.log_image("sorted_accuracies", pixels, run.step)

    def on_fit_end(self, run: Run) -> None:
        """Logs the table."""
        if run.results:
            run.loggers.log_text("table", format_table(run.results.values()), run.step)
        for logger in run.loggers.all:
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
