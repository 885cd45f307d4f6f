"""Workers in this process, and models that fail or end their worker."""

import contextlib
import os
import pickle
import signal
import subprocess
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial

import torch

from fedmoe_pl import PersonalizedMoE
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import LocalTraining, TrainerBackend, WorkersBackend
from fedmoe_pl.backends.workers.pickling import dumps, loads
from fedmoe_pl.backends.workers.workers_backend import RemoteWorker, Worker
from helpers import OneWeight
from helpers.backends import begin, local_training
from helpers.runs import data, model

CPU = torch.device("cpu")
SIZES = (13, 8, 30, 11)


def training(module=None, datamodule=None, **kwargs) -> LocalTraining:
    module, datamodule = module or model(), datamodule or data(sizes=SIZES)
    datamodule.setup()
    algorithm = FedAvg("global_expert.*") if isinstance(module, PersonalizedMoE) else FedAvg()
    return replace(local_training(module, algorithm, datamodule, max_epochs=1), **kwargs)


def trained(backend, training, kept=None) -> list:
    """The groups of a phase's first round."""
    return trained_round(begin(backend, training), kept)


def trained_round(plan, kept=None, round=0) -> list:
    server = plan.training.algorithm.server_init(plan.training.module)
    groups = plan.groups(range(plan.training.datamodule.num_clients))
    return list(plan.train(server, groups, kept or {}, round))


class InThisProcess(RemoteWorker):
    """A worker in this process, which answers in an order of its own and says what it was sent."""

    def __init__(self, datamodule, log):
        super().__init__(CPU)
        self.worker = Worker(datamodule, CPU)
        self.log = log

    def submit(self, phase, server, groups):
        _, chunk, kept = pickle.loads(groups)
        clients = [client for group in chunk for client in group]
        self.log.append((phase is not None, server is not None, clients, sorted(kept)))
        future = Future()
        try:
            future.set_result(self.worker.work(phase, server, groups))
        except Exception as error:
            future.set_exception(error)
        return future

    def result(self, future):
        return future.result()

    def end(self):
        self.log.append("end")


class TwoInThisProcess(WorkersBackend):
    worker = InThisProcess

    def __init__(self, backend=None, lazy=False):
        super().__init__(backend or TrainerBackend(), [CPU, CPU], lazy)
        self.log = []

    def share(self, obj, datamodule=None):
        buffers = []
        return dumps(obj, datamodule, buffer_callback=buffers.append), buffers

    def start_worker(self, device):
        pickled, buffers = self.data
        return self.worker(loads(pickled, buffers=buffers), self.log)


class TwoArgumentsError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


class Fails(OneWeight):
    def __init__(self, error):
        super().__init__()
        self.error = error

    def training_step(self, batch, batch_idx):
        raise self.error()


class KillsItsProcess(PersonalizedMoE):
    """Ends its process in the middle of a client's training, where it is a worker and the file is there."""

    def __init__(self, *args, file, **kwargs):
        super().__init__(*args, **kwargs)
        self.file = str(file)
        self.driver = os.getpid()

    def loss_of(self, scores, y, reduction="mean"):
        if os.getpid() != self.driver:
            with contextlib.suppress(FileNotFoundError):  # another worker may be the first
                os.unlink(self.file)
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss_of(scores, y, reduction)


def killing_model(file):
    torch.manual_seed(0)
    expert = model().global_expert
    return KillsItsProcess(expert, optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5), file=file)


def workers() -> set[int]:
    """Ids of this process's worker processes."""
    return {worker for server in _children(os.getpid()) for worker in _children(server)}


def _children(process: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=,state=", "--ppid", str(process)], capture_output=True, text=True)
    rows = (line.split() for line in listed.stdout.splitlines())
    return [int(process_id) for process_id, state in rows if not state.startswith("Z")]


def wait_until(is_true) -> None:
    deadline = time.monotonic() + 10
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
