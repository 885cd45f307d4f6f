"""What the models of a finished run say: their accuracies, and the class of each sample."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.evaluation.measure import predict
from fedmoe_pl.evaluation.metrics import predicts_classes, preds_of
from fedmoe_pl.evaluation.outputs import has_task, mixture_of
from fedmoe_pl.evaluation.results import Evaluation
from fedmoe_pl.logs.summary import write_csv
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.evaluate import evaluate_phase
from fedmoe_pl.rounds.run import Run


def _evaluated_phases(run: Run) -> list[Phase]:
    found = [phase for phase in run.phases if phase.name in run.states and run.states[phase.name].evaluations]
    if not found:
        names = [phase.name for phase in run.phases]
        raise InvalidArgumentError("Federation", "phases", names, "phases of which the checkpoint has a result")
    return found


def evaluate_all(run: Run) -> list[Evaluation]:
    """Evaluates the results of all methods of a run."""
    evaluations = (evaluate_phase(run, phase, run.training(phase)) for phase in _evaluated_phases(run))
    return [evaluation for of_phase in evaluations for evaluation in of_phase]


def write_predictions(run: Run) -> str:
    """Writes ``predictions.csv`` into the run's folder, and says so."""
    for phase in _evaluated_phases(run):
        if has_task(module := run.module(phase), "causal_lm"):
            because = "predictions are one class or a few values for each sample"
            raise InvalidArgumentError(module, "task", "causal_lm", "another for fedmoe predict", because)
    path = run.folder / "predictions.csv"
    return f"{write_csv(path, _predictions(run))} predictions: {path}{run.other_test_set}"


def _predictions(run: Run) -> Iterator[dict[str, object]]:
    """The rows of ``predictions.csv``: for each method and client, its test samples, or else the global ones."""
    datamodule = run.datamodule
    results = [evaluation for phase in _evaluated_phases(run) for evaluation in run.states[phase.name].evaluations]
    for evaluation in results:
        for client in run.clients:
            test_samples = datamodule.test_samples[client]
            samples = test_samples if len(test_samples) else datamodule.global_test
            module = run.client_predictor(evaluation.method, client)
            logits, weights, targets = predict(module, datamodule, samples)
            weights = weights if getattr(module, "has_global_expert", True) else None
            mixture = mixture_of(module)
            if predicts_classes(module, datamodule) or (mixture is not None and mixture.task == "multiclass"):
                columns, names = _values(logits.argmax(1), targets), dict(enumerate(datamodule.classes or ()))
            else:
                columns, names = _values(*preds_of(module, logits, targets)), {}
            values: dict[str, list[Any]] = {"sample": samples.tolist()}
            values |= {} if datamodule.files is None else {"file": [datamodule.files[sample] for sample in samples]}
            for name, column in columns.items():  # a model may have more outputs than there are classes
                values[name] = [names.get(each, each) for each in column.tolist()]
            values["gate_weight"] = (
                [math.nan] * len(samples) if weights is None else weights[:, :-1].sum(dim=1).tolist()
            )
            of_all = {"method": evaluation.method, "evaluation_point": evaluation.evaluation_point, "client": client}
            of_all |= {"name": name} if (name := datamodule.client_names.given_name(client)) else {}
            for of_sample in zip(*values.values(), strict=True):
                yield of_all | dict(zip(values, of_sample, strict=True))


def _values(predictions: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Columns of labels and predictions, each of shape (n,); several of each if a sample has several values."""
    columns: dict[str, Tensor] = {}
    for name, values in (("label", targets), ("prediction", predictions)):
        each = values.flatten(1).unbind(1) if values.dim() > 1 else [values]
        columns |= {name if len(each) == 1 else f"{name}_{index}": value for index, value in enumerate(each)}
    return columns
