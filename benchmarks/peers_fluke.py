"""fluke (FedAvg) as a harness of ``peers.py``: one federation of all rounds, held up between them.

fluke trains its clients one after another: its ``ParallelServer`` refuses to start with fewer than two GPUs. Its own
loaders shuffle with one random state for all clients; those here shuffle as the bare loop does. Clients are not
persistent, because persistent ones would keep their momentum. fluke evaluates a client's model after its training
(``post_fit``) with seven metrics by default; here it is accuracy alone.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.client import Client
from fluke.config import OptimizerConfigurator
from fluke.data import FastDataLoader
from fluke.evaluation import ClassificationEval
from fluke.server import Server
from fluke.utils import ClientObserver, FederationObserver
from peers_harness import Task, Turns, load_task
from plain import EVALUATED_AT_ONCE, Work, shuffled_batches
from torch import Generator, Tensor, nn
from torchmetrics import Accuracy

CLASSES = 10


class ClientData(FastDataLoader):
    """A client's samples in the order of the bare loop."""

    def __init__(self, work: Work, client: int) -> None:
        super().__init__(work.samples[client], num_labels=CLASSES, batch_size=work.batch_size)
        self.work = work
        self.client = client

    def begin(self, seed: int) -> None:
        """Begin a round."""
        self.generator = Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch."""
        return shuffled_batches(self.work, self.client, self.generator)


class Held(FederationObserver, ClientObserver):
    """Starts a round when the driver asks for it."""

    def __init__(self, task: Task, turns: Turns, server: Server, data: list[ClientData]) -> None:
        self.task = task
        self.turns = turns
        self.server = server
        self.data = data

    def start_round(self, round: int, global_model: nn.Module) -> None:
        """Wait for the driver; fluke counts rounds from 1."""
        self.turns.wait()
        self.accuracies: dict[int, float] = {}
        for client, data in enumerate(self.data):
            data.begin(self.task.seeds[round - 1][client])

    def client_evaluation(self, round: int, client_id: int, phase: str, evals: dict[str, float]) -> None:
        """Remember a client's accuracy."""
        self.accuracies[client_id] = evals["accuracy"]

    def end_round(self, round: int) -> None:
        """Tell the driver."""
        self.turns.answer(self.server.model.state_dict(), [accuracy for _, accuracy in sorted(self.accuracies.items())])


def main(path: str) -> None:
    """Run the federation."""
    turns = Turns(path, "fluke-fl")
    task = load_task(path)
    environment = FlukeENV()
    environment.set_eval_cfg(post_fit=task.test is not None, server=False)
    environment.set_evaluator(ClassificationEval(1, CLASSES, accuracy=Accuracy("multiclass", num_classes=CLASSES)))
    test = FastDataLoader(*task.test, num_labels=CLASSES, batch_size=EVALUATED_AT_ONCE) if task.test else None
    data = [ClientData(task.work, client) for client in range(len(task.work.samples))]
    clients = [
        Client(
            index=client,
            train_set=samples,
            test_set=test,
            optimizer_cfg=OptimizerConfigurator(DDict(name=torch.optim.SGD, lr=0.01, momentum=0.5)),
            loss_fn=nn.CrossEntropyLoss(),
            local_epochs=task.work.epochs,
            persistency=False,
        )
        for client, samples in enumerate(data)
    ]
    server = Server(task.model, None, clients)
    algorithm = FedAVG(len(clients), None, DDict(), clients=clients, server=server)
    algorithm.set_callbacks([Held(task, turns, server, data)])
    algorithm.run(n_rounds=len(task.seeds), eligible_perc=1.0)


if __name__ == "__main__":
    main(sys.argv[1])
