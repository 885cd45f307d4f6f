"""Accuracies, costs and hyperparameters in the run's loggers."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from matplotlib.figure import Figure

from fedmoe_pl.callbacks.figures import log_figure, new_figure, styled, styles
from fedmoe_pl.callbacks.hparams import method_hparams, run_hparams
from fedmoe_pl.callbacks.sample_monitor import check_clients
from fedmoe_pl.evaluation.results import ACCURACIES, Evaluation
from fedmoe_pl.logs.summary import format_table, present_metrics, scale
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import FederationCallback, Run


class AccuracyMonitor(FederationCallback):
    """Sends accuracies and other metrics to the run's loggers.

    In every evaluated round, every logger gets the method's accuracies, such as ``local_test/mean``, and what the phase
    has cost so far, such as ``resources/bytes_up`` and ``resources/flops``. The step is the number of the phase's
    completed rounds or, with ``Evaluate.every_n_epochs``, epochs. In TensorBoard, MLflow and Weights & Biases, each
    method is a run with these tags; in other loggers the method's name comes first: ``FedAvg/local_test/mean``. Loggers
    that take pictures get sorted curves of all clients' accuracies. At the end of a phase, the final means over the
    clients are logged, in TensorBoard as a row of the page HParams, and in the method's run of MLflow and of Weights &
    Biases together with its hyperparameters. Loggers other than TensorBoard's get all of these before the first round.

    With ``trainer.logger: true``, every logger also gets what the clients' modules log in their training, such as
    ``train_loss``, and their learning rates: the mean over the clients that trained, for each local epoch, under the
    names that a plain Trainer's logger shows. The step is the number of local epochs since the phase began.
    If they validate, ``validation_loss`` is theirs; otherwise it is the loss of every evaluation, as in
    ``validation_loss/mean``.

    Args:
        clients: ids of clients that get curves of their own, such as ``local_test/client_003`` and
            ``train_loss/client_003``.

    Raises:
        MisconfigurationException: if an id is no client's.
    """

    def __init__(self, clients: list[int] | None = None) -> None:
        self.clients = clients or []

    def on_fit_start(self, run: Run) -> None:
        """Logs the hyperparameters, so that a logger that cannot take them fails before any training."""
        if self.clients:
            check_clients(self, self.clients, run.datamodule)
        if run.loggers.all:  # reading the configuration takes longer than a round of a small model
            run.loggers.log_hparams(run_hparams(run.configuration, run.seed))

    def on_server_update(self, run: Run, phase: Phase, round: int) -> None:
        """Logs the means of what clients logged in each local epoch of the round."""
        epochs = phase.epochs(run.trainer)
        for epoch in range(max(map(len, run.logged.values()), default=0)):
            # sorted, because a sum depends on the order
            of_clients = {client: means[epoch] for client, means in sorted(run.logged.items()) if epoch < len(means)}
            values = dict[str, float]()
            for name in dict.fromkeys(name for means in of_clients.values() for name in means):
                of_name = {client: means[name] for client, means in of_clients.items() if name in means}
                values[name] = sum(of_name.values()) / len(of_name)
                for client in (each for each in self.clients if each in of_name):
                    values[f"{name}/{run.datamodule.client_names.file(client)}"] = of_name[client]
            run.loggers.log_scalars(phase.name, values, round * epochs + epoch + 1)

    def on_evaluation_end(self, run: Run, phase: Phase, evaluation: Evaluation) -> None:
        """Logs mean, standard deviation and worst tenth of each accuracy, a fraction, and metric, and the costs."""
        trainer = phase.client_trainer(run.trainer)
        # then `validation_loss` is what clients log in training
        logs_loss = trainer.get("logger") and trainer.get("limit_val_batches")
        metrics = [*evaluation.metrics, *([] if logs_loss else ["validation_loss"])]
        values = {
            f"{metric}/{name}": value
            for metric in metrics
            for name, value in evaluation.spread_or_nan(metric)._asdict().items()
            if not math.isnan(value)
        }
        for client in (each for each in evaluation.clients if each.client in self.clients):
            name = run.datamodule.client_names.file(client.client)
            own = {f"{metric}/{name}": client.value(metric) for metric in metrics}
            values |= {tag: value for tag, value in own.items() if not math.isnan(value)}
        state = run.states[phase.name]
        privacy = {"epsilon": state.epsilon, "sample_epsilon": state.sample_epsilon}
        costs = {**state.traffic, "flops": state.flops, **privacy} if state.round else {}
        values |= {f"resources/{name}": float(value) for name, value in costs.items() if not math.isnan(value)}
        run.loggers.log_scalars(evaluation.method, values, evaluation.step)

    def on_phase_end(self, run: Run, phase: Phase, evaluation: Evaluation | None) -> None:
        """Logs the phase's final accuracies, and draws those of all clients for all methods so far."""
        if not run.loggers.all:
            return
        of_phases = method_hparams(run.configuration, run.seed)
        for final in run.states[phase.name].evaluations:
            means = {metric: final.spread(metric).mean for metric in present_metrics([final])}
            hparams = {"method": final.method, **of_phases.get(phase.name, {})}
            run.loggers.log_result(final.method, hparams, means, final.step, [*of_phases.values()])
        if present_metrics(run.results.values()):  # clients of a deployed federation may report none
            log_figure(run, "sorted_accuracies", lambda: sorted_accuracy_figure(run.results.values()), run.step)

    def on_fit_end(self, run: Run) -> None:
        """Logs the table."""
        if run.results:
            run.loggers.log_text("table", format_table(run.results.values()), run.step)
        for logger in run.loggers.all:
            logger.save()


@styled
def sorted_accuracy_figure(evaluations: Iterable[Evaluation]) -> Figure:
    """The clients' accuracies in ascending order (their cumulative distribution), one line per method."""
    evaluations = list(evaluations)
    metrics = present_metrics(evaluations)
    of_methods = styles(evaluation.method for evaluation in evaluations)
    figure = new_figure(height=0.6 + 1.9 * len(metrics))
    panels = figure.subplots(len(metrics), 1, sharex=True, squeeze=False)[:, 0]
    for axes, metric in zip(panels, metrics, strict=True):
        for evaluation in evaluations:
            values = scale(metric) * np.array(evaluation.values(metric))
            if len(values):
                style = of_methods[evaluation.method]
                line = {"color": style.color, "linestyle": style.linestyle, "label": evaluation.method}
                axes.ecdf(values, orientation="horizontal", **line)
        label = "accuracy in percent" if metric in ACCURACIES else metric.replace("_", " ")
        axes.set(title=f"{metric.replace('_', ' ')}: all clients, sorted", xlim=(0, 1), ylabel=label)
        axes.grid()
    panels[-1].set_xlabel("share of clients with at most this value")
    lines = panels[0].get_lines()
    figure.legend(lines, [str(line.get_label()) for line in lines], loc="outside lower center", ncols=3)
    return figure
