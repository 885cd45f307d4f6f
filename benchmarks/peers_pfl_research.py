"""pfl-research (FedAvg) as a harness of ``peers.py``: one training of all rounds, held up between them.

Several workers are as many processes that share out the clients through torch.distributed (gloo), as pfl does it on
several machines. pfl's own data sets keep the order of the first epoch; those here are shuffled anew in each. pfl
evaluates a client's model before and after its training; here only after it, on the same images for all.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import itertools
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial

import torch
from peers_harness import Task, Turns, load_task
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, TrainMetricName, Weighted
from pfl.model.pytorch import PyTorchModel
from plain import EVALUATED_AT_ONCE, Work, shuffled_batches
from torch import Generator, Tensor, nn

RANK, ADDRESSES = "PFL_WORKER_RANK", "PFL_WORKER_ADDRESSES"  # read by pfl when it is imported


class Classifier(nn.Sequential):
    """The task's model with the methods that pfl asks for."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        """Loss of a batch."""
        self.train()
        return nn.functional.cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Weighted]:
        """Accuracy of a batch."""
        self.eval()
        return {"accuracy": Weighted(int((self(x).argmax(1) == y).sum()), len(y))}


class Evaluated(PyTorchModel):
    """What trains the classifier, and evaluates it on the task's test images after the training of each client."""

    held: Held

    def evaluate(
        self,
        dataset: ClientData,
        name_formatting_fn: Callable[[str], TrainMetricName],
        eval_params: NNEvalHyperParams | None = None,
    ) -> Metrics:
        """Nothing before training; pfl evaluates in the first round in any case."""
        name = name_formatting_fn("accuracy")
        if self.held.test is None or not name.after_training:
            return Metrics()
        metrics = super().evaluate(self.held.test, name_formatting_fn, eval_params)
        self.held.accuracies[int(dataset.user_id)] = metrics[name].overall_value
        return metrics


class ClientData(Dataset):
    """A client's samples in the order of the bare loop."""

    def __init__(self, work: Work, client: int, seed: int) -> None:
        super().__init__((work.samples[client],), user_id=str(client))
        self.epoch = partial(shuffled_batches, work, client, Generator().manual_seed(seed))

    def iter(self, batch_size: int | None) -> Iterator[tuple[Tensor, Tensor]]:
        """One epoch."""
        return self.epoch()


class Held(TrainingProcessCallback):
    """Starts a round when the driver asks for it, in all processes.

    Args:
        task: what to do.
        turns: the driver; None in all processes but the first.
    """

    def __init__(self, task: Task, turns: Turns | None) -> None:
        self.task = task
        self.turns = turns
        self.round = -1
        self.test = PyTorchTensorDataset(task.test) if task.test else None

    def wait(self) -> None:
        """Wait for the driver, or for the process that does."""
        if self.turns:
            self.turns.wait()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        self.round += 1
        self.accuracies = torch.zeros(len(self.task.work.samples) if self.test else 0, dtype=torch.float64)
        # Every process draws the clients of all of them, and where these do not come out even, not equally many.
        self.clients = itertools.cycle(range(len(self.task.work.samples)))

    def next_client(self) -> int:
        """The client that is drawn next."""
        return next(self.clients)

    def client_data(self, client: int) -> ClientData:
        """A client's data in this round."""
        return ClientData(self.task.work, client, self.task.seeds[self.round][client])

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        """Wait for the first round."""
        self.wait()
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        """Tell the driver, and wait for the next round."""
        if self.test and torch.distributed.is_initialized():
            torch.distributed.all_reduce(self.accuracies)
        if self.turns:
            self.turns.answer(model.pytorch_model.state_dict(), self.accuracies.tolist())
        self.wait()
        return False, Metrics()


def restart_as_first_of(count: int) -> None:
    """Start the other processes and replace this one by the first of them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {**os.environ, ADDRESSES: ",".join([address] * count)}  # they meet at the first address
    command = [sys.executable, *sys.argv]
    for rank in range(1, count):
        subprocess.Popen(command, env={**environment, RANK: str(rank)}, stdin=subprocess.DEVNULL)
    os.execve(sys.executable, command, {**environment, RANK: "0"})


def main(path: str) -> None:
    """Run the training."""
    task = load_task(path)
    if task.workers > 1 and RANK not in os.environ:
        restart_as_first_of(task.workers)
    held = Held(task, Turns(path, "pfl") if os.environ.get(RANK, "0") == "0" else None)
    clients, work = len(task.work.samples), task.work
    classifier = Classifier(*task.model)
    model = Evaluated(
        classifier,
        local_optimizer_create=partial(torch.optim.SGD, momentum=0.5),
        central_optimizer=torch.optim.SGD(classifier.parameters(), lr=1.0),
    )
    model.held = held
    data = FederatedDataset(held.client_data, held.next_client)
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=len(task.seeds),
            evaluation_frequency=1 if task.test else len(task.seeds),
            train_cohort_size=clients,
            val_cohort_size=None,
        ),
        backend=SimulatedBackend(training_data=data, val_data=data),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=work.epochs, local_learning_rate=0.01, local_batch_size=work.batch_size
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=EVALUATED_AT_ONCE),
        callbacks=[held],
        send_metrics_to_platform=False,
    )


if __name__ == "__main__":
    main(sys.argv[1])
