"""Hands out groups of clients to worker processes; subclasses start the processes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from traceback import format_exception
from typing import Any

from typing_extensions import Self

from fedmoe_pl.backends.backend import Backend, Chunk, GroupUpdate, Job, Plan
from fedmoe_pl.backends.failures import Failure
from fedmoe_pl.backends.traffic import Traffic
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.backends.workers.handing_out import HandedOut, RemoteWorker
from fedmoe_pl.backends.workers.pickling import portable
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.trees import Tree

_CHUNKS = 4  # per worker at least, so that none waits long for the last one
_PARTS = 32  # of groups that are evaluated, so that no worker waits long for the last one


class WorkersBackend(Backend):
    """Hands out groups of clients to workers, largest first, and yields their updates in order.

    Groups and their order are the same as in one process, and so are the bits of the result, however many workers there
    are and whichever answers first. A worker is sent only what it lacks: the phase, the server's state, and the tensors
    that the group's clients have kept. It holds nothing else, so that a dead worker can be replaced and its group
    trained again.

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
            MisconfigurationException: if they cannot be started, or the data cannot be sent to them.
        """

    @abstractmethod
    def replacement(self, worker: RemoteWorker) -> RemoteWorker:
        """Starts a worker in place of one that died."""

    def plan(self, training: LocalTraining) -> Plan:
        """The plan of the workers' backend, whose groups are handed out."""
        plan = self.backend.plan(training)
        return WorkersPlan(self, plan, plan.description)

    def train(
        self, plan: Plan, server: Tree, groups: Sequence[list[int]], kept: Mapping[int, Tree], round: int
    ) -> Iterator[GroupUpdate]:
        """Trains groups in the workers and yields them in order; arguments as in :meth:`hand_out`."""
        if groups:
            self._start_workers(plan)
            chunks = plan.chunks(groups, at_least=_CHUNKS * len(self.workers))
            job = partial(_train_groups, round=round)
            yield from self.hand_out(plan, job, server, chunks, kept, _failed_groups)

    def hand_out(
        self,
        plan: Plan,
        job: Job,
        server: Tree,
        chunks: Sequence[Chunk],
        kept: Mapping[int, Tree],
        give_up: Callable[[Chunk, str], list[Any]] | None = None,
    ) -> Iterator[Any]:
        """Does work for groups of clients in the workers, and yields each group's result in order.

        A worker is handed the groups of a chunk together. ``give_up`` makes the results of a chunk with which three
        workers have died, or which took one of them too long, from the chunk and the reason; without it, that raises an
        exception. Exceptions of the work are raised unchanged.
        """
        if not chunks:
            return
        self._start_workers(plan)
        handed_out = HandedOut(self.workers, self.replace, plan, job, server, chunks, kept, give_up)
        try:
            yield from handed_out.results()
        finally:
            if handed_out.busy:  # there was an exception, and nobody waits for the other answers
                self.close()

    def _start_workers(self, plan: Plan) -> None:
        if not self.workers:
            self.workers = self.start(plan.training.datamodule)

    def replace(self, worker: RemoteWorker) -> RemoteWorker:
        """Cleans up after a worker that died, and starts another in its place."""
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
        """Leaves out the workers when the backend is copied or sent to one of them."""
        return {**vars(self), "workers": []}


class HandingOutPlan(Plan):
    """The base of plans that hand out the groups of another plan.

    Args:
        backend: the backend that has the workers.
        plan: how each of them trains its groups.
        description: how the phase is trained, and why; for the log.
    """

    def __init__(self, backend: WorkersBackend, plan: Plan, description: str) -> None:
        super().__init__(plan.training, description)
        self.backend = backend
        self.plan = plan

    def begin(self, training: LocalTraining) -> Self:
        """Begins the other plan, too."""
        begun = super().begin(training)
        begun.plan = self.plan.begin(training)
        return begun

    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """The groups of the other plan."""
        return self.plan.groups(cohort)

    def chunks(self, groups: Sequence[list[int]], at_least: int = 1) -> list[Chunk]:
        """The chunks of the other plan."""
        return self.plan.chunks(groups, at_least)

    def train_groups(
        self, server: Tree, groups: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
    ) -> list[GroupUpdate]:
        """Trains some groups in this process."""
        return self.plan.train_groups(server, groups, kept, round)


class WorkersPlan(HandingOutPlan):
    """Hands out all groups."""

    def train(self, server: Tree, cohort: Sequence[int], kept: Mapping[int, Tree], round: int) -> Iterator[GroupUpdate]:
        """Trains the cohort in the workers; see :meth:`WorkersBackend.hand_out`."""
        yield from self.backend.train(self.plan, server, self.groups(cohort), kept, round)

    def map(self, job: Job, server: Tree, groups: Sequence[list[int]], kept: Mapping[int, Tree]) -> Iterator[Any]:
        """Does the work in the workers; see :meth:`WorkersBackend.hand_out`."""
        yield from self.backend.hand_out(self.plan, job, server, parts_of(groups), kept)


def parts_of(groups: Sequence[list[int]]) -> list[Chunk]:
    """Groups in parts that one worker is handed together."""
    size = -(-len(groups) // _PARTS)
    return [[*groups[start : start + size]] for start in range(0, len(groups), size or 1)]


def _train_groups(
    plan: Plan, server: Tree, groups: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
) -> list[GroupUpdate]:
    updates = plan.train_groups(server, groups, kept, round)
    return [replace(update, failed=_portable(update.failed)) for update in updates]


def _portable(failed: Mapping[int, Failure]) -> dict[int, Failure]:
    """Failures that another process can read, with the tracebacks that it cannot."""
    with_traces = ((client, failure, failure.error) for client, failure in failed.items())
    return {
        client: Failure(failure.reason, portable(error), "".join(format_exception(error))) if error else failure
        for client, failure, error in with_traces
    }


def _failed_groups(groups: Chunk, reason: str) -> list[GroupUpdate]:
    return [GroupUpdate(None, {}, Traffic(), failed=dict.fromkeys(group, Failure(reason))) for group in groups]
