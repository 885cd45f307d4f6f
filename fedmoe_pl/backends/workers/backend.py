"""Groups of clients handed out to worker processes, whatever starts these processes."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.backends.backend import Backend, GroupUpdate, Plan
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.backends.workers.pickling import dumps, sendable
from fedmoe_pl.backends.workers.worker import PhaseMessage
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.trees import Tree

_TRIES = 3  # one death may be another process's fault, three of the same clients are not
_AHEAD = 8  # updates per worker that may wait for an earlier one, which bounds the memory that they take


class WorkerDied(Exception):
    """The process of a worker has ended before it answered; its message says how."""


class RemoteWorker(ABC):
    """The driver's end of a worker.

    Attributes:
        plan: the plan of the phase that the worker was sent last.
        server: the server's state that it was sent last, pickled.
    """

    plan: Plan | None = None
    server: bytes | None = None

    @abstractmethod
    def submit(self, phase: bytes | None, server: bytes | None, group: bytes) -> Future[Any]:
        """Calls :meth:`Worker.train_group` without waiting for it."""

    @abstractmethod
    def result(self, future: Future[Any]) -> bytes:
        """What the finished call has returned.

        Raises:
            WorkerDied: if the process has ended; what the call itself has raised is raised as it is.
        """

    @abstractmethod
    def end(self) -> None:
        """Ends the process at once."""


class WorkersBackend(Backend):
    """Hands groups of clients out to workers, largest first, and yields their updates in order.

    Groups and their order are those of training in one process, and so are the bits of the result, whatever the number
    of workers and whoever answers first. Workers are sent only what they lack: the phase, the server's state, and what
    the group's clients have kept. They hold nothing else, so that one that dies is replaced and its group is trained
    again.

    Args:
        backend: how each worker trains its groups.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.workers: list[RemoteWorker] = []

    @abstractmethod
    def start(self, datamodule: FederatedDataModule) -> list[RemoteWorker]:
        """Starts all workers.

        Raises:
            MisconfigurationException: if they cannot be started or sent the data.
        """

    @abstractmethod
    def replacement(self, worker: RemoteWorker) -> RemoteWorker:
        """Starts a worker in the place of one that died."""

    def plan(self, training: LocalTraining) -> Plan:
        """The plan of the workers' backend, whose groups are handed out."""
        plan = self.backend.plan(training)
        return WorkersPlan(self, plan, plan.description)

    def hand_out(
        self, plan: Plan, server: Tree, groups: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
    ) -> Iterator[GroupUpdate]:
        """Trains groups in the workers and yields them in order.

        Args:
            plan: how each worker trains its groups.
            server: the server's state.
            groups: the groups, in the order in which they are yielded.
            kept: what clients kept from earlier rounds.
            round: the round of the phase, counted from 0.

        Raises:
            MisconfigurationException: if something cannot be sent to a worker process, or if a group ends its worker
                every time; what training itself raises is raised as it is.
        """
        if not groups:
            return
        if not self.workers:
            self.workers = self.start(plan.training.datamodule)
        handed_out = _HandedOut(self, plan, server, groups, kept, round)
        try:
            yield from handed_out.updates()
        finally:
            if handed_out.busy:  # after an exception nobody waits for these
                self.close()

    def replace(self, worker: RemoteWorker) -> RemoteWorker:
        """Ends a worker that died, and starts another in its place."""
        worker.end()
        new = self.replacement(worker)
        self.workers[self.workers.index(worker)] = new
        return new

    def close(self) -> None:
        """Ends the workers."""
        for worker in self.workers:
            worker.end()
        self.workers = []

    def __getstate__(self) -> dict[str, Any]:
        """Without the workers, where a configuration that holds this backend is copied or sent to one of them."""
        return {**vars(self), "workers": []}


class WorkersPlan(Plan):
    """Hands out the groups of another plan.

    Args:
        backend: has the workers.
        plan: how each of them trains its groups.
        description: what trains the phase, and why, in words for the log.
    """

    def __init__(self, backend: WorkersBackend, plan: Plan, description: str) -> None:
        super().__init__(plan.training, description)
        self.backend = backend
        self.plan = plan

    def begin(self, training: LocalTraining) -> WorkersPlan:
        """The same with the other plan begun."""
        return WorkersPlan(self.backend, self.plan.begin(training), self.description)

    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """Those of the other plan."""
        return self.plan.groups(cohort)

    def train_group(self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int) -> GroupUpdate:
        """Trains one group in this process."""
        return self.plan.train_group(server, clients, kept, round)

    def train(self, server: Tree, cohort: Sequence[int], kept: Mapping[int, Tree], round: int) -> Iterator[GroupUpdate]:
        """As :meth:`Plan.train`, in the workers; raises what :meth:`WorkersBackend.hand_out` raises."""
        yield from self.backend.hand_out(self.plan, server, self.groups(cohort), kept, round)


def group_size(training: LocalTraining, clients: Sequence[int]) -> int:
    """Training samples of a group: a measure of how long it takes."""
    return sum(len(training.datamodule.train_samples[client]) for client in clients)


def _dead(clients: Sequence[int], death: WorkerDied) -> str:
    some = ", ".join(map(str, clients[:5])) + (", ..." if len(clients) > 5 else "")
    return (
        f"The worker process that trains client {some} has ended {_TRIES} times ({death}), probably for lack of "
        "memory; use fewer workers (trainer.devices), or smaller batches or models."
    )


class _HandedOut:
    """The groups of a round in the workers' hands.

    Attributes:
        busy: the worker and the group's place of every call that is under way.
    """

    def __init__(
        self,
        backend: WorkersBackend,
        plan: Plan,
        server: Tree,
        groups: Sequence[Sequence[int]],
        kept: Mapping[int, Tree],
        round: int,
    ) -> None:
        self.backend = backend
        self.groups = groups
        self.send = _Sender(plan, server, kept, round)
        self.waiting = sorted(range(len(groups)), key=lambda index: -group_size(plan.training, groups[index]))
        self.idle = list(backend.workers)
        self.busy: dict[Future[Any], tuple[RemoteWorker, int]] = {}
        self.done: dict[int, bytes] = {}
        self.deaths: Counter[int] = Counter()

    def updates(self) -> Iterator[GroupUpdate]:
        """The groups' updates in order."""
        ready = 0
        while ready < len(self.groups):
            self._send_some(ready)
            while ready in self.done:
                yield pickle.loads(self.done.pop(ready))
                ready += 1
            if self.busy:
                for future in wait(self.busy, return_when=FIRST_COMPLETED).done:
                    self._take(future)

    def _send_some(self, ready: int) -> None:
        """Gives every idle worker the largest group that is not too far ahead of the first one that is missing."""
        within = [index for index in self.waiting if index < ready + _AHEAD * len(self.backend.workers)]
        for index, worker in zip(within, list(self.idle), strict=False):
            self.idle.remove(worker)
            self.waiting.remove(index)
            self.busy[self.send(worker, self.groups[index])] = worker, index

    def _take(self, future: Future[Any]) -> None:
        """Takes what a worker has answered, or replaces one that died."""
        worker, index = self.busy.pop(future)
        try:
            self.done[index] = worker.result(future)
        except WorkerDied as death:
            self.deaths[index] += 1
            if self.deaths[index] == _TRIES:
                raise MisconfigurationException(_dead(self.groups[index], death)) from death
            self.waiting.insert(0, index)
            worker = self.backend.replace(worker)
        self.idle.append(worker)


class _Sender:
    """Sends a round's groups; everything is pickled once, and only where a worker lacks it."""

    def __init__(self, plan: Plan, server: Tree, kept: Mapping[int, Tree], round: int) -> None:
        self.plan = plan
        self.kept = kept
        self.round = round
        self.server = dumps(server)
        self.phase: bytes | None = None

    def __call__(self, worker: RemoteWorker, clients: Sequence[int]) -> Future[Any]:
        phase = server = None
        if worker.plan is not self.plan:
            phase = self.phase = self.phase or self._pickled_phase()
            worker.plan = self.plan
        if worker.server is not self.server:
            server = worker.server = self.server
        kept = {client: self.kept[client] for client in clients if client in self.kept}
        return worker.submit(phase, server, dumps((list(clients), kept, self.round)))

    def _pickled_phase(self) -> bytes:
        phase = PhaseMessage(self.plan)
        return sendable("the model or its algorithm", lambda: dumps(phase, self.plan.training.datamodule))
