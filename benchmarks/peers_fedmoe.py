"""fedmoe_pl as a harness of ``peers.py``: one federation of all rounds, held up between them."""

from __future__ import annotations

import sys
import tempfile

from peers_harness import Turns, load_task
from workload import RandomImages, make_model

from fedmoe_pl import Evaluate, backends
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.evaluation.evaluation import Evaluation
from fedmoe_pl.federation import Federation
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import Run

PARTS = {"global_expert.extractor": "0", "global_expert.classifier": "1"}  # as the task's model names them


class Held(FederationCallback):
    """Starts a round when the driver asks for it."""

    def __init__(self, turns: Turns) -> None:
        self.turns = turns
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


def main(path: str, backend: str) -> None:
    """Run the federation."""
    turns = Turns(path, "lightning")
    task = load_task(path)
    clients, num_test = len(task.work.samples), len(task.test[1]) if task.test else 1
    data = RandomImages(clients, len(task.work.samples[0]), task.work.batch_size, num_test)
    phase = Phase(
        "FedAvg",
        FedAvg(shared="global_expert.*"),
        rounds=len(task.seeds),
        evaluate=Evaluate(after="local_training") if task.test else False,
    )
    trainer = {"max_epochs": task.work.epochs, "accelerator": "cpu", "devices": task.workers}
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(
            phases=[phase],
            trainer=trainer,
            backend="auto" if backend == "auto" else getattr(backends, backend)(),
            callbacks=[Held(turns)],
            logger=False,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        federation.fit(make_model(gate_weight=1), data)


if __name__ == "__main__":
    main(*sys.argv[1:])
