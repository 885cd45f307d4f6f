"""BlazeFL (FedAvg) as a harness of ``peers.py``: its loop of server and trainer, held up between rounds.

BlazeFL leaves a client's training to its user; it is that of the bare loop, so what comes on top is BlazeFL's own. Its
process pool, new in every round, is forked from a process that has trained once, as PyTorch's first step takes two
seconds. Its thread pool is slower where Python has a global interpreter lock.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import copy
import sys
import threading
from dataclasses import dataclass, replace
from typing import Any

import torch.multiprocessing as mp
from blazefl.contrib.fedavg import FedAvgBaseServerHandler, FedAvgDownlinkPackage, FedAvgProcessPoolUplinkPackage
from blazefl.core import ModelSelector, ProcessPoolClientTrainer, SHMHandle, deserialize_model, serialize_model
from peers_harness import Task, Turns, load_task
from plain import accuracy, train_client
from torch import nn


@dataclass
class ClientConfig:
    """What a worker needs to know of a client."""

    task: str
    client: int
    seed: int


class TaskModel(ModelSelector):
    """Gives out the task's model."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def select_model(self, model_name: str) -> nn.Module:
        """A copy of the model."""
        return copy.deepcopy(self.task.model)


class Trainer(ProcessPoolClientTrainer[Any, FedAvgDownlinkPackage, ClientConfig, FedAvgProcessPoolUplinkPackage]):
    """Trains and evaluates the clients as the bare loop does."""

    def __init__(self, path: str, task: Task) -> None:
        self.num_parallels = task.workers
        self.device = "cpu"
        self.device_count = 0
        self.cache = []
        self.manager = mp.Manager()
        self.stop_event = self.manager.Event()
        self.path = path
        self.task = task
        self.buffer = serialize_model(task.model)
        self.round = 0

    def get_client_config(self, cid: int) -> ClientConfig:
        """A client's seed in this round."""
        return ClientConfig(self.path, cid, self.task.seeds[self.round][cid])

    def prepare_uplink_package_buffer(self) -> FedAvgProcessPoolUplinkPackage:
        """Where a worker writes the parameters."""
        metadata = {"accuracy": 0.0} if self.task.test else None
        return FedAvgProcessPoolUplinkPackage(-1, self.buffer.clone(), 0, metadata)

    def convert_buffer_to_uplink(self, buffer: FedAvgProcessPoolUplinkPackage) -> FedAvgProcessPoolUplinkPackage:
        """The server takes what the worker returned."""
        return buffer

    def uplink_package(self) -> list[FedAvgProcessPoolUplinkPackage]:
        """What the clients of the round returned."""
        packages, self.cache = self.cache, []
        return packages

    @staticmethod
    def worker(
        config: ClientConfig,
        payload: FedAvgDownlinkPackage,
        device: str,
        stop_event: threading.Event,
        *,
        shm_buffer: FedAvgProcessPoolUplinkPackage,
    ) -> FedAvgProcessPoolUplinkPackage:
        """Train a client in a worker process."""
        task = load_task(config.task)
        model = copy.deepcopy(task.model)
        deserialize_model(model, payload.model_parameters)
        train_client(model, task.work, config.client, config.seed)
        shm_buffer.model_parameters.copy_(serialize_model(model))
        metadata = {"accuracy": accuracy(model, *task.test)} if task.test else None
        return FedAvgProcessPoolUplinkPackage(
            config.client, SHMHandle(), len(task.work.samples[config.client]), metadata
        )


def main(path: str) -> None:
    """Run the rounds."""
    turns = Turns(path, "blazefl")
    task = load_task(path)
    mp.set_start_method("fork")
    train_client(copy.deepcopy(task.model), replace(task.work, epochs=1), 0, 0)
    handler = FedAvgBaseServerHandler(
        model_selector=TaskModel(task),
        model_name="",
        dataset=None,
        global_round=len(task.seeds),
        num_clients=len(task.work.samples),
        sample_ratio=1.0,
        device="cpu",
        batch_size=task.work.batch_size,
        seed=0,
    )
    trainer = Trainer(path, task)
    while not handler.is_stopped():
        trainer.round, _ = turns.wait()
        trainer.local_process(handler.downlink_package(), handler.sample_clients())
        packages = trainer.uplink_package()
        for package in packages:
            handler.load(package)
        turns.answer(handler.model.state_dict(), [package.metadata["accuracy"] for package in packages if task.test])


if __name__ == "__main__":
    main(sys.argv[1])
