"""Worker processes that train one client together, each on a device of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from typing import Any

import torch
from torch import distributed
from torch.utils.data import default_collate
from typing_extensions import Self

from fedmoe_pl.algorithms.algorithm import overrides
from fedmoe_pl.backends.backend import GroupUpdate, Job, Plan
from fedmoe_pl.backends.loop import trains_by_loss
from fedmoe_pl.backends.traffic import Traffic
from fedmoe_pl.backends.trainer import TrainerBackend
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.backends.workers.pickling import SharedObject, dumps
from fedmoe_pl.backends.workers.process import LocalWorker, PoolBackend
from fedmoe_pl.backends.workers.workers_backend import RemoteWorker, WorkerDied, WorkersPlan
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.models.layers import treats_samples_apart
from fedmoe_pl.models.mixtures.tasks import is_mean_over_samples, weighs_labels
from fedmoe_pl.trees import Tree

_GRACE = 5.0  # seconds in which the other processes may also report a failure; they might hang waiting for each other
_STORE = "FEDMOE_PROCESS_GROUP"  # environment variable: the file by which the processes find each other
# listen on the loopback interface only, which other machines cannot reach
_LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "NODE_RANK": "0"}


class DistributedBackend(PoolBackend):
    """Trains one client at a time, in one process per device, with a distributed strategy of Lightning.

    Every process prepares the client and trains it on its share of each batch; the first process returns the client's
    update. Clients are evaluated in the calling process.

    Args:
        devices: the device of each process.
        loss_is_mean: as in ``TrainerBackend``.
    """

    def __init__(self, devices: Sequence[torch.device], loss_is_mean: bool = False) -> None:
        super().__init__(TrainerBackend(loss_is_mean), devices[:1])
        self.loss_is_mean = loss_is_mean
        self.devices_of_client = list(devices)

    def plan(self, training: LocalTraining) -> DistributedPlan:
        """Plans one Trainer per client in each process."""
        check_division(training, self.loss_is_mean)
        number = len(self.devices_of_client)
        strategy = training.trainer["strategy"]
        name = strategy if isinstance(strategy, str) else type(strategy).__name__
        plan = self.backend.plan(replace(training, devices=self.devices_of_client))
        return DistributedPlan(self, plan, f"one client at a time in {number} processes ({name})")

    def start_worker(self, device: torch.device) -> RemoteWorker:
        """Starts a team of processes, which acts as one worker."""
        return _Team(self.data, self.devices_of_client)


class DistributedPlan(WorkersPlan):
    """Has all processes train each client."""

    @staticmethod
    def train_chunk(
        plan: Plan, server: Tree, chunk: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
    ) -> list[GroupUpdate]:
        """Trains a client on this process's share of its batches; only the first process returns the result."""
        _join_processes(plan.training)
        trained = plan.train_groups(server, chunk, kept, round)
        if failed := {client: failure for group in trained for client, failure in group.failed.items()}:
            raise _FailedError(failed)
        return trained if distributed.get_rank() == 0 else []

    def begin(self, training: LocalTraining) -> Self:
        """Begins the processes' plan as well."""
        return super().begin(replace(training, devices=self.plan.training.devices))

    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """Makes each client a group of its own, because the processes end when it fails."""
        return [[client] for client in cohort]

    def train_groups(
        self, server: Tree, groups: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
    ) -> list[GroupUpdate]:
        """Trains groups of one client in the processes."""
        return [*self.train(server, [[*group] for group in groups], kept, round)]

    def map(self, job: Job, server: Tree, groups: Sequence[list[int]], kept: Mapping[int, Tree]) -> Iterator[Any]:
        """Does work other than training in this process."""
        return self.plan.map(job, server, groups, kept)

    def _is_handed_out(self, groups: Sequence[Sequence[int]], paces: Sequence[float], later: int) -> bool:
        return True


class _Team(RemoteWorker):
    """The processes as one worker. If one of them fails, all are ended, because the others may be waiting for it."""

    def __init__(self, data: SharedObject, devices: Sequence[torch.device]) -> None:
        super().__init__(devices[0])
        self.data = data
        self.devices = devices
        self.processes: list[RemoteWorker] = []
        self.futures: list[Future[Any]] = []
        self._start()

    def _start(self) -> None:
        # has no name, so that it is deleted however this process ends
        self.store = tempfile.TemporaryFile()
        self.waiting = ThreadPoolExecutor(1)
        store = f"/proc/{os.getpid()}/fd/{self.store.fileno()}"
        for rank, device in enumerate(self.devices):
            environment = {**_LOOPBACK, _STORE: store, "LOCAL_RANK": str(rank)}
            self.processes.append(LocalWorker(self.data, device, **environment))

    def submit(self, phase: SharedObject | None, server: bytes | None, groups: bytes) -> Future[Any]:
        if not self.processes:
            self._start()
        self.futures = [process.submit(phase, server, groups) for process in self.processes]
        return self.waiting.submit(wait, self.futures, return_when=FIRST_EXCEPTION)

    def result(self, future: Future[Any]) -> bytes:
        wait(self.futures, _GRACE)
        answers, errors = list[bytes](), list[Exception]()
        for process, of_process in zip(self.processes, self.futures, strict=True):
            try:
                if of_process.done():
                    answers.append(process.result(of_process))
            except Exception as error:
                errors.append(error)
        if not errors:
            return answers[0]
        self.end()
        # report a death first, because the others' errors may only be lost connections to the dead process
        error = min(errors, key=lambda error: (not isinstance(error, WorkerDied), isinstance(error, _FailedError)))
        if not isinstance(error, _FailedError):
            raise error
        return dumps([GroupUpdate(None, {}, Traffic(), failed=error.args[0])])

    def end(self) -> None:
        for process in self.processes:
            process.end()
        self.waiting.shutdown()
        self.processes, self.plan, self.server = [], None, None
        self.store.close()


class _FailedError(Exception):
    """A client failed in a process; the argument maps the client to its failure."""


def _join_processes(training: LocalTraining) -> None:
    """Connects this process to the others unless it is connected."""
    if distributed.is_initialized():
        return
    default = "gloo" if training.device.type == "cpu" else "nccl"
    backend = getattr(training.trainer["strategy"], "process_group_backend", None) or default
    rank, number = int(os.environ["LOCAL_RANK"]), len(training.devices)
    distributed.init_process_group(backend, f"file://{os.environ[_STORE]}", rank=rank, world_size=number)


def check_division(training: LocalTraining, loss_is_mean: bool) -> None:
    """Refuses a loss that is not the mean over the samples of a batch, because DDP averages gradients of its parts.

    Losses of this package and PyTorch are known to be means, with layers that treat samples apart. For all others, the
    user has to say so with ``loss_is_mean``.
    """
    module, because = training.module, ""
    if not module.automatic_optimization:
        because = f"{type(module).__name__} optimizes manually"
    elif getattr(module, "load_balancing", 0):
        because = "the load-balancing loss of a batch is not the mean over its samples"
    if because:
        raise InvalidArgumentError("Trainer", "trainer.strategy", training.trainer["strategy"], "left out", because)
    if not loss_is_mean and (unknown := _unknown(training)):
        allowed = "True, if the loss of a batch is the mean over its samples"
        because = f"trainer.strategy divides batches, and nothing is known of {unknown}"
        raise InvalidArgumentError("TrainerBackend", "loss_is_mean", loss_is_mean, allowed, because)


def _unknown(training: LocalTraining) -> str:
    """What may keep the loss of a batch from being the mean over its samples; empty if nothing does."""
    module, algorithm, reader = training.module, training.algorithm, training.datamodule.reader
    criterion = getattr(module, "criterion", None)
    if not type(algorithm).__module__.startswith("fedmoe_pl.") or "client_loss" in vars(algorithm):
        return f"the algorithm {type(algorithm).__name__}"
    if not isinstance(module, MixtureOfExperts) or not trains_by_loss(training):
        return f"the loss of {type(module).__name__}"
    if not is_mean_over_samples(criterion) or (weighs_labels(criterion) and overrides(algorithm, "client_loss")):
        of_algorithm = f" in the loss of {type(algorithm).__name__}" if overrides(algorithm, "client_loss") else ""
        return f"{getattr(criterion, '__name__', type(criterion).__name__)}{of_algorithm}"
    if not treats_samples_apart(module):
        return f"the layers of {type(module).__name__}, of which some may compare samples"
    return "" if reader is None or reader.data.collate_fn is default_collate else "the data's collate_fn"
