"""What the models of a finished run say: their accuracies, and the class of each sample."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fedmoe_pl.evaluation.accuracies import predict
from fedmoe_pl.evaluation.evaluation import Evaluation
from fedmoe_pl.evaluation.metrics import predicts_classes, preds_of
from fedmoe_pl.evaluation.outputs import labelled_batches, mixture_of
from fedmoe_pl.logs.summary import prediction_rows, write_csv
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.evaluate import evaluate_phase
from fedmoe_pl.rounds.run import Run

_MOST_VALUES = 100


def _evaluated_phases(run: Run) -> list[Phase]:
    return [phase for phase in run.phases if phase.name in run.states and run.states[phase.name].evaluations]


def evaluate_all(run: Run) -> list[Evaluation]:
    """Evaluates the results of all methods of a run."""
    evaluations = (evaluate_phase(run, phase, run.training(phase)) for phase in _evaluated_phases(run))
    return [evaluation for of_phase in evaluations for evaluation in of_phase]


def write_predictions(run: Run) -> str:
    """Writes ``predictions.csv`` into the run's folder, and says so."""
    path = run.folder / "predictions.csv"
    return f"{write_csv(path, _predictions(run))} predictions: {path}"


def _predictions(run: Run) -> Iterator[dict[str, object]]:
    """The rows of ``predictions.csv``: for each method and client, its test samples, or else the global ones."""
    datamodule = run.datamodule
    results = [evaluation for phase in _evaluated_phases(run) for evaluation in run.states[phase.name].evaluations]
    for evaluation in results:
        for client in run.clients:
            test_samples = datamodule.test_samples[client]
            samples = test_samples if len(test_samples) else datamodule.global_test
            module = run.client_predictor(evaluation.method, client)
            logits, weights = predict(module, datamodule, samples)
            weights = weights if getattr(module, "has_global_expert", True) else None
            targets = torch.cat([y.cpu() for _, y in labelled_batches(datamodule, samples)])
            mixture = mixture_of(module)
            if predicts_classes(module, datamodule) or (mixture is not None and mixture.task == "multiclass"):
                columns = _values(logits.argmax(1), targets)
            else:
                columns = _values(*preds_of(module, logits, targets))
            yield from prediction_rows(evaluation, client, samples, columns, weights)


def _values(predictions: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Columns of labels and predictions, each of shape (n,); several of each if a sample has several values."""
    number = targets[:1].numel()
    if max(number, predictions[:1].numel()) > _MOST_VALUES:
        raise MisconfigurationException(
            f"predict: the model gives {predictions[:1].numel()} values for a sample, but at most {_MOST_VALUES} are "
            "written; Federation.client_module gives a client's model."
        )
    columns: dict[str, Tensor] = {}
    for name, values in (("label", targets), ("prediction", predictions)):
        each = values.flatten(1).unbind(1) if values.dim() > 1 else [values]
        columns |= {name if len(each) == 1 else f"{name}_{index}": value for index, value in enumerate(each)}
    return columns
