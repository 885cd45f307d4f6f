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

_TRIES = 3  # another process may cause one death, but hardly three over the same clients
_AHEAD = 8  # how many updates per worker may wait for an earlier one, which bounds their memory


class WorkerDied(Exception):
    """The process of a worker has ended before it answered; the message says how."""


class RemoteWorker(ABC):
    """The driver's end of a worker.

    Attributes:
        plan: the plan that was sent to the worker last.
        server: the server's state that was sent to it last, pickled.
    """

    plan: Plan | None = None
    server: bytes | None = None

    @abstractmethod
    def submit(self, phase: bytes | None, server: bytes | None, group: bytes) -> Future[Any]:
        """Calls :meth:`Worker.train_group` without waiting for it."""

    @abstractmethod
    def result(self, future: Future[Any]) -> bytes:
        """The result of a finished call.

        Raises:
            WorkerDied: if the process has ended. What the call has raised is raised unchanged.
        """

    @abstractmethod
    def end(self) -> None:
        """Ends the process at once."""


class WorkersBackend(Backend):
    """Hands groups of clients out to workers, largest first, and yields their updates in order.

    Groups and their order are those of training in one process. So are the bits of the result, whatever the number of
    workers and whichever answers first. Workers are sent only what they lack: the phase, the server's state, and what
    the group's clients have kept. They hold nothing else, so a worker that dies is replaced and its group is trained
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
        """Starts a worker that replaces one that died."""

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
            groups: the groups, in the order in which their updates are yielded.
            kept: the tensors that clients kept from earlier rounds, by client.
            round: the round of the phase, counted from 0.

        Raises:
            MisconfigurationException: if something cannot be sent to a worker process, or if its worker dies three
                times over one group. What training raises is raised unchanged.
        """
        if not groups:
            return
        if not self.workers:
            self.workers = self.start(plan.training.datamodule)
        handed_out = _HandedOut(self, plan, server, groups, kept, round)
        try:
            yield from handed_out.updates()
        finally:
            if handed_out.busy:  # after an exception, nobody waits for their answers
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
        """Leaves out the workers when a configuration that holds this backend is copied, or sent to one of them."""
        return {**vars(self), "workers": []}


class WorkersPlan(Plan):
    """Hands out the groups of another plan.

    Args:
        backend: has the workers.
        plan: how each of them trains its groups.
        description: how the phase is trained, and why; for the log.
    """

    def __init__(self, backend: WorkersBackend, plan: Plan, description: str) -> None:
        super().__init__(plan.training, description)
        self.backend = backend
        self.plan = plan

    def begin(self, training: LocalTraining) -> WorkersPlan:
        """Begins the other plan."""
        return WorkersPlan(self.backend, self.plan.begin(training), self.description)

    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """Those of the other plan."""
        return self.plan.groups(cohort)

    def train_group(self, server: Tree, clients: Sequence[int], kept: Mapping[int, Tree], round: int) -> GroupUpdate:
        """Trains one group in this process."""
        return self.plan.train_group(server, clients, kept, round)

    def train(self, server: Tree, cohort: Sequence[int], kept: Mapping[int, Tree], round: int) -> Iterator[GroupUpdate]:
        """Trains the cohort in the workers; see :meth:`WorkersBackend.hand_out`."""
        yield from self.backend.hand_out(self.plan, server, self.groups(cohort), kept, round)


def group_size(training: LocalTraining, clients: Sequence[int]) -> int:
    """Number of training samples of a group: a measure of how long it takes."""
    return sum(len(training.datamodule.train_samples[client]) for client in clients)


def _dead(clients: Sequence[int], death: WorkerDied) -> str:
    some = ", ".join(map(str, clients[:5])) + (", ..." if len(clients) > 5 else "")
    return (
        f"The worker process that trains client {some} has ended {_TRIES} times ({death}), probably for lack of "
        "memory; use fewer workers, or smaller batches or models."
    )


class _HandedOut:
    """The groups of a round that are handed out.

    A group is known by its index, the workers by their ends in this process.

    Attributes:
        waiting: the groups that no worker has, in the order in which they are handed out.
        idle: workers without a group.
        busy: worker and group of every call that is under way.
        done: pickled updates that wait for those of earlier groups.
        deaths: how many workers have died over each group.
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
        """Yields the groups' updates in order."""
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
        """Gives idle workers the largest groups that are not too far ahead of the first missing one, ``ready``."""
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
    """Sends a round's groups; phase and server's state are pickled once, and sent to workers that lack them."""

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
