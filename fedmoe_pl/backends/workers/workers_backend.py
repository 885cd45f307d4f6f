"""Hands out groups of clients to worker processes; subclasses start the processes."""

from __future__ import annotations

import math
import pickle
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from typing_extensions import Self

from fedmoe_pl.backends.backend import Backend, Chunk, GroupUpdate, Job, Plan, group_size
from fedmoe_pl.backends.failures import Failure, portable
from fedmoe_pl.backends.local_client import data_on
from fedmoe_pl.backends.rounding import precisions, set_backend
from fedmoe_pl.backends.traffic import Traffic
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.backends.workers.pickling import Pickled, dumps, loads, sendable
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.trees import Tree

WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # otherwise glibc returns the buffers of large batches to the system in every step, for 15 to 35 % of a step's time
    "MALLOC_MMAP_THRESHOLD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_TOP_PAD_": "67108864",
}
"""Environment of a worker process, which libraries read when they are loaded."""

_BACKENDS = (
    *("cudnn.enabled", "cudnn.benchmark", "cudnn.deterministic", "mkldnn.enabled"),
    *(f"cuda.matmul.allow_{name}" for name in ("fp16_accumulation", "fp16_reduced_precision_reduction")),
    "cuda.matmul.allow_bf16_reduced_precision_reduction",
)


def torch_settings() -> list[Callable[[], None]]:
    """The settings of this process that affect results, as calls that apply them in another process."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return [
        partial(torch.set_default_dtype, torch.get_default_dtype()),
        partial(torch.use_deterministic_algorithms, is_deterministic, warn_only=warn_only),
        *(partial(set_backend, path, attrgetter(path)(torch.backends)) for path in _BACKENDS),
        *precisions(),
    ]


class Worker:
    """Does the work in a worker process."""

    def __init__(self, datamodule: FederatedDataModule, device: torch.device) -> None:
        self.datamodule = data_on(datamodule, device)
        self.device = device

    def work(self, phase: Pickled | None, server: bytes | None, groups: bytes) -> bytes:
        """Does a job for some groups of clients; a phase or server state that is None stays that of the last call."""
        try:
            if phase is not None:
                self._begin_phase(phase)
            if server is not None:
                self.server = loads(server, known=self.plan.training.initial)
            job, chunk, kept = pickle.loads(groups)
            return dumps(job(self.plan, self.server, chunk, kept), known=self.plan.training.initial)
        except Exception as error:
            raise portable(error) from error

    def _begin_phase(self, phase: Pickled) -> None:
        pickled, buffers = phase
        plan, settings = loads(pickled, self.datamodule, buffers=buffers)
        for apply in settings:
            apply()
        if (before := getattr(self, "plan", None)) is not None:
            before.training.elsewhere.clear()
        on_cpu = plan.training.trainer.get("accelerator") == "cpu"  # the user's choice, even if the cluster has GPUs
        self.plan = plan.begin(replace(plan.training, device=torch.device("cpu") if on_cpu else self.device))


_CHUNKS = 4  # least number of training chunks per worker, so that no worker waits long for the last one
_PARTS = 32  # least number of chunks to evaluate, for the same reason
_WORTH_STARTING = 10.0  # seconds to gain; new interpreters spend half of that on imports, and the estimate is rough
_TRIES = 3  # one death may be another process's fault, but hardly three deaths with the same clients
_GRACE = 60.0  # seconds added to the clients' time limits before a worker is overdue; it may have to start first
_AHEAD = 8  # how many results per worker may wait for an earlier one, to limit memory


class WorkerDied(Exception):
    """A worker's process ended before it answered; the message is the name of the exception that showed it."""


class RemoteWorker(ABC):
    """The driver's handle of a worker on a device, with the last plan and pickled server state sent to the worker."""

    plan: Plan | None = None
    server: bytes | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def submit(self, phase: Any, server: bytes | None, groups: bytes) -> Future[Any]:
        """Calls :meth:`Worker.work` without waiting; ``phase`` is an object that the backend has shared, or None."""

    def result(self, future: Future[Any]) -> bytes:
        """The result of a finished call, or what it raised: ``WorkerDied`` if the process has ended."""
        return future.result()

    @abstractmethod
    def end(self) -> None:
        """Ends the process at once."""


class WorkersBackend(Backend):
    """Hands out groups of clients to workers, largest first, and yields their updates in order.

    Groups and their order are the same as in one process, so that the result is bit-identical, however many workers
    there are and whichever answers first. A worker is sent only what it lacks: the phase, the server's state, and the
    tensors that the group's clients keep. It holds nothing else, so that a dead worker can be replaced and its groups
    trained again.

    Args:
        backend: how each worker trains its groups.
        devices: the device of each worker.
        lazy: whether work begins in this process. Workers start once they would shorten the phase by enough at the pace
            measured so far. The result is bit-identical.
        where: text to append to the plan's description.
    """

    def __init__(
        self, backend: Backend, devices: Sequence[torch.device] = (), lazy: bool = False, where: str = ""
    ) -> None:
        self.backend = backend
        self.devices = list(devices)
        self.lazy = lazy
        self.where = where
        self.workers: list[RemoteWorker] = []
        self.data: Any = None

    @abstractmethod
    def share(self, obj: Any, datamodule: FederatedDataModule | None = None) -> Any:
        """Puts an object, without the data module, where all workers can load it; returns what to send to them."""

    @abstractmethod
    def start_worker(self, device: torch.device) -> RemoteWorker:
        """Starts a worker on the shared ``data``; also called to replace one that died."""

    def is_worth_starting(self, gain: float) -> bool:
        """Whether to start the workers, if they are expected to shorten the phase by ``gain`` seconds."""
        return gain >= _WORTH_STARTING

    def start(self, datamodule: FederatedDataModule) -> None:
        """Starts all workers if they are not running.

        Raises:
            MisconfigurationException: if workers cannot be started or the data cannot be sent to them.
        """
        if self.workers:
            return
        try:
            self.data = sendable("the data module", lambda: self.share(datamodule))
        except Exception:
            self.close()
            raise
        self.workers = [self.start_worker(device) for device in self.devices]

    def replace(self, worker: RemoteWorker) -> RemoteWorker:
        """Cleans up after a worker that died, and starts another in its place."""
        worker.end()
        new = self.start_worker(worker.device)
        self.workers[self.workers.index(worker)] = new
        return new

    def plan(self, training: LocalTraining) -> Plan:
        """Plans with the workers' backend; the groups of its plan are handed out."""
        plan = self.backend.plan(training)
        return WorkersPlan(self, plan, plan.description + self.where)

    def close(self) -> None:
        """Ends the workers."""
        for worker in self.workers:
            worker.end()
        self.workers, self.data = [], None

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out workers and data when the backend is copied or sent to a worker."""
        return {**vars(self), "workers": [], "data": None}


class WorkersPlan(Plan):
    """Hands out the groups of another plan, which each worker follows."""

    def __init__(self, backend: WorkersBackend, plan: Plan, description: str) -> None:
        super().__init__(plan.training, description)
        self.backend = backend
        self.plan = plan
        self.may_start = True
        self.paces = list[float]()  # seconds per training sample of each chunk trained in this process

    def begin(self, training: LocalTraining) -> Self:
        """Begins the other plan as well."""
        begun = super().begin(training)
        begun.plan, begun.paces = self.plan.begin(training), []
        return begun

    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """The groups of the other plan."""
        return self.plan.groups(cohort)

    def train_groups(
        self, server: Tree, groups: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
    ) -> list[GroupUpdate]:
        """Trains some groups in this process."""
        return self.plan.train_groups(server, groups, kept, round)

    def train(
        self, server: Tree, groups: Sequence[list[int]], kept: Mapping[int, Tree], round: int
    ) -> Iterator[GroupUpdate]:
        """Trains the groups in the workers."""
        later = (self.training.rounds - round - 1) * self._size(groups)
        job = partial(self.train_chunk, round=round)
        yield from self._work(job, server, [*groups], kept, self.plan.chunks, self.paces, later, _failed_groups)

    @staticmethod
    def train_chunk(
        plan: Plan, server: Tree, chunk: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
    ) -> list[GroupUpdate]:
        """Trains the groups of a chunk in a worker."""
        return plan.train_groups(server, chunk, kept, round)

    def map(self, job: Job, server: Tree, groups: Sequence[list[int]], kept: Mapping[int, Tree]) -> Iterator[Any]:
        """Does the work in the workers."""
        yield from self._work(job, server, [*groups], kept, _parts_of, [])

    def _work(
        self,
        job: Job,
        server: Tree,
        groups: list[list[int]],
        kept: Mapping[int, Tree],
        chunks: Callable[..., list[Chunk]],
        paces: list[float],
        later: int = 0,
        give_up: Callable[[Chunk, str], list[Any]] | None = None,
    ) -> Iterator[Any]:
        """Works for groups in this process until the workers take over; yields each group's result in order.

        Exceptions of the job are raised unchanged. If three workers have died with a chunk, or it took one of them too
        long, ``give_up`` makes its results from the chunk and the reason; without ``give_up``, an exception is raised.
        """
        while groups and not self._is_handed_out(groups, paces, later):
            chunk = chunks(groups)[0]
            start = time.perf_counter()
            results = job(self.plan, server, chunk, kept)
            paces.append((time.perf_counter() - start) / self._size(chunk))
            groups = groups[len(chunk) :]
            yield from results
        if not groups:
            return
        self.backend.start(self.training.datamodule)
        chunks_of_workers = chunks(groups, at_least=_CHUNKS * len(self.backend.workers))
        handed_out = _HandedOut(self.backend, self.plan, job, server, chunks_of_workers, kept, give_up)
        try:
            yield from handed_out.results()
        finally:
            if handed_out.busy:  # after an exception, nobody takes the remaining answers
                self.backend.close()

    def _is_handed_out(self, groups: Sequence[Sequence[int]], paces: Sequence[float], later: int) -> bool:
        """Whether the workers do the rest; starts them if that pays off."""
        backend = self.backend
        if backend.workers:
            return True
        if len(groups) == 1 and all(device.type == "cpu" for device in backend.devices):
            return False  # one group cannot be divided
        if not backend.lazy:
            return True
        if len(paces) < 2 or not self.may_start:  # the first chunk is slower, because some things are done only once
            return False
        share = 1 - 1 / min(len(backend.devices), len(groups))
        if not backend.is_worth_starting(min(paces) * (self._size(groups) + later) * share):
            return False
        try:
            backend.start(self.training.datamodule)
        except MisconfigurationException as error:
            warnings.warn(f"Training continues in one process: {error}", stacklevel=2)
            self.may_start = False
        return self.may_start

    def _size(self, groups: Sequence[Sequence[int]]) -> int:
        return sum(group_size(self.training, clients) for clients in groups)


@dataclass(eq=False)
class _HandedOutChunk:
    """A chunk, the number of workers that have died with it, and its pickled results."""

    groups: Chunk
    deaths: int = 0
    results: bytes | None = None

    @property
    def clients(self) -> list[int]:
        return [client for group in self.groups for client in group]


class _HandedOut:
    """Hands out the chunks of a round to the workers."""

    def __init__(
        self,
        backend: WorkersBackend,
        plan: Plan,
        job: Job,
        server: Tree,
        chunks: Sequence[Chunk],
        kept: Mapping[int, Tree],
        give_up: Callable[[Chunk, str], list[Any]] | None,
    ) -> None:
        self.backend = backend
        self.plan, self.job, self.kept = plan, job, kept
        self.server = dumps(server, known=plan.training.initial)
        self.give_up = give_up
        self.seconds = plan.training.client_timeout if give_up else None
        self.order = [_HandedOutChunk(chunk) for chunk in chunks]  # chunks whose results have not been yielded
        # chunks still to hand out, in this order
        self.waiting = sorted(self.order, key=lambda chunk: -group_size(plan.training, chunk.clients))
        self.ahead = _AHEAD * len(backend.workers)
        self.idle = list(backend.workers)
        # worker, chunk and deadline of every call in progress
        self.busy: dict[Future[Any], tuple[RemoteWorker, _HandedOutChunk, float]] = {}

    @cached_property
    def phase(self) -> Any:
        """The phase, shared once for all workers that lack it."""
        message, training = (self.plan, torch_settings()), self.plan.training
        _ = training.copies  # makes module and initial tensors share what nobody trains, so that it is sent once
        return sendable("the model or its algorithm", lambda: self.backend.share(message, training.datamodule))

    def results(self) -> Iterator[Any]:
        """Yields the groups' results in order."""
        while self.order:
            self._send_some()
            while self.order and (results := self.order[0].results) is not None:
                self.order.pop(0)
                yield from loads(results, known=self.plan.training.initial)
            if self.busy:
                soonest = min(deadline for _, _, deadline in self.busy.values())
                patience = None if soonest == math.inf else max(0.0, soonest - time.monotonic())
                for future in wait(self.busy, patience, FIRST_COMPLETED).done:
                    self._take(future)
                self._end_overdue()

    def _send_some(self) -> None:
        """Gives idle workers the largest chunks that are not too far ahead of the first missing result."""
        first = {*self.order[: self.ahead]}
        within = [chunk for chunk in self.waiting if chunk in first]
        for chunk, worker in zip(within, list(self.idle), strict=False):
            self.idle.remove(worker)
            self.waiting.remove(chunk)
            seconds = math.inf if self.seconds is None else self.seconds * len(chunk.clients) + _GRACE
            self.busy[self._send(worker, chunk)] = worker, chunk, time.monotonic() + seconds

    def _send(self, worker: RemoteWorker, chunk: _HandedOutChunk) -> Future[Any]:
        phase = server = None
        if worker.plan is not self.plan:
            phase, worker.plan = self.phase, self.plan
        if worker.server is not self.server:
            server = worker.server = self.server
        kept = {client: self.kept[client] for client in chunk.clients if client in self.kept}
        return worker.submit(phase, server, dumps((self.job, chunk.groups, kept)))

    def _take(self, future: Future[Any]) -> None:
        """Takes a worker's answer, or replaces the worker if it died."""
        worker, chunk, _ = self.busy.pop(future)
        try:
            chunk.results = worker.result(future)
        except WorkerDied as death:
            chunk.deaths += 1
            self._try_again(chunk, death)
            worker = self.backend.replace(worker)
        self.idle.append(worker)

    def _try_again(self, chunk: _HandedOutChunk, death: WorkerDied) -> None:
        """Puts back a chunk whose worker died; before the last try, splits it into groups, so that only one fails."""
        if chunk.deaths == _TRIES:
            if self.give_up is None:
                ids = ", ".join(map(str, chunk.clients[:5])) + (", ..." if len(chunk.clients) > 5 else "")
                raise MisconfigurationException(
                    f"The worker process that trains client {ids} has ended {_TRIES} times ({death}), probably for "
                    "lack of memory; use fewer workers, or smaller batches or models."
                ) from death
            reason = f"its worker process has ended {_TRIES} times ({death})"
            chunk.results = dumps(self.give_up(chunk.groups, reason))
        elif chunk.deaths == _TRIES - 1 and len(chunk.groups) > 1:
            parts = [_HandedOutChunk([group], chunk.deaths) for group in chunk.groups]
            place = self.order.index(chunk)
            self.order[place : place + 1] = parts
            self.waiting[:0] = parts
        else:
            self.waiting.insert(0, chunk)

    def _end_overdue(self) -> None:
        """Ends workers that did not answer in time, because a client hangs where the alarm cannot interrupt it."""
        for future, (worker, chunk, deadline) in list(self.busy.items()):
            if time.monotonic() >= deadline:
                del self.busy[future]
                assert self.give_up is not None, "only then is there a deadline"
                seconds = f"{self.seconds:g} s for each client"
                reason = f"its worker process did not answer within failures.timeout, {seconds}"
                chunk.results = dumps(self.give_up(chunk.groups, reason))
                self.idle.append(self.backend.replace(worker))


def _parts_of(groups: Sequence[list[int]], at_least: int = 1) -> list[Chunk]:
    size = -(-len(groups) // max(at_least, _PARTS))
    return [[*groups[start : start + size]] for start in range(0, len(groups), size)]


def _failed_groups(groups: Chunk, reason: str) -> list[GroupUpdate]:
    """The results of groups in which all clients failed."""
    return [GroupUpdate(None, {}, Traffic(), failed=dict.fromkeys(group, Failure(reason))) for group in groups]
