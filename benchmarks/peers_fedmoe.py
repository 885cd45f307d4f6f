"""fedmoe_pl as a harness of ``peers.py``: ``fedmoe fit`` with a run of all rounds, held up between them."""

from __future__ import annotations

from peers_harness import Turns

from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.evaluation.results import Evaluation
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import Run

PARTS = {"global_expert.extractor": "0", "global_expert.classifier": "1"}  # as the task's model names them


class Held(FederationCallback):
    """Starts a round when the driver asks for it.

    Args:
        task: file of the task.
    """

    def __init__(self, task: str) -> None:
        self.turns = Turns(task, "lightning")
        self.accuracies: list[float] = []

    def on_round_start(self, run: Run, phase: Phase, round: int) -> None:
        """Wait for the driver."""
        self.turns.wait()

    def on_evaluation_end(self, run: Run, phase: Phase, evaluation: Evaluation) -> None:
        """Remember the clients' accuracies."""
        self.accuracies = [client.global_test for client in evaluation.clients]

    def on_round_end(self, run: Run, phase: Phase, round: int) -> None:
        """Tell the driver."""
        weights = {}
        for name, tensor in run.states[phase.name].server.items():
            part = next(part for part in PARTS if name.startswith(part))
            weights[PARTS[part] + name.removeprefix(part)] = tensor
        self.turns.answer(weights, self.accuracies)
