"""What the models of a finished run say: their accuracies, and the class of each sample."""

from __future__ import annotations

from collections.abc import Iterator

from fedmoe_pl.rounds.accuracies import predict
from fedmoe_pl.rounds.evaluate_round import evaluate_phase
from fedmoe_pl.rounds.evaluation import Evaluation
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.rounds.results import prediction_rows
from fedmoe_pl.rounds.run import Run


def _evaluated_phases(run: Run) -> list[Phase]:
    return [phase for phase in run.phases if phase.name in run.states and run.states[phase.name].evaluations]


def evaluate_all(run: Run) -> list[Evaluation]:
    """Evaluates the results of all methods of a run."""
    evaluations = (evaluate_phase(run, phase, run.training(phase)) for phase in _evaluated_phases(run))
    return [evaluation for of_phase in evaluations for evaluation in of_phase]


def predictions(run: Run) -> Iterator[dict[str, object]]:
    """The rows of ``predictions.csv``: for each method and client, its test samples, or else the global ones."""
    datamodule = run.datamodule
    results = [evaluation for phase in _evaluated_phases(run) for evaluation in run.states[phase.name].evaluations]
    for evaluation in results:
        for client, test_samples in enumerate(datamodule.test_samples):
            samples = test_samples if len(test_samples) else datamodule.global_test
            module = run.client_predictor(evaluation.method, client)
            logits, weights = predict(module, datamodule, samples)
            weights = weights if getattr(module, "has_global_expert", True) else None
            yield from prediction_rows(evaluation, client, samples, datamodule.y[samples], logits, weights)
