"""Hands out chunks of groups to workers, and collects their results in order."""

from __future__ import annotations

import pickle
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.backends.backend import Chunk, Job, Plan, group_size
from fedmoe_pl.backends.workers.pickling import dumps, sendable
from fedmoe_pl.backends.workers.worker import PhaseMessage
from fedmoe_pl.trees import Tree

_TRIES = 3  # another process may cause one death, but hardly three with the same clients
_AHEAD = 8  # how many updates per worker may wait for an earlier one; limits their memory


class WorkerDied(Exception):
    """A worker's process ended before it answered; the message says how."""


class RemoteWorker(ABC):
    """The driver's handle of a worker.

    Attributes:
        plan: the last plan that was sent to the worker.
        server: the last server state that was sent to it, pickled.
    """

    plan: Plan | None = None
    server: bytes | None = None

    @abstractmethod
    def submit(self, phase: bytes | None, server: bytes | None, groups: bytes) -> Future[Any]:
        """Calls :meth:`Worker.work` without waiting for it."""

    @abstractmethod
    def result(self, future: Future[Any]) -> bytes:
        """The result of a finished call.

        Raises:
            WorkerDied: if the process has ended. Exceptions of the call itself are raised unchanged.
        """

    @abstractmethod
    def end(self) -> None:
        """Ends the process at once."""


def _clients(chunk: Chunk) -> list[int]:
    return [client for group in chunk for client in group]


def _dead(clients: Sequence[int], death: WorkerDied) -> str:
    ids = ", ".join(map(str, clients[:5])) + (", ..." if len(clients) > 5 else "")
    return (
        f"The worker process that trains client {ids} has ended {_TRIES} times ({death}), probably for lack of "
        "memory; use fewer workers, or smaller batches or models."
    )


class HandedOut:
    """The chunks of groups of a round that are handed out.

    Chunks are identified by index.

    Args:
        workers: the workers.
        replace: starts another worker in place of one that died.
        plan: how each worker trains its groups.
        job: what to do for each chunk.
        server: the server's state.
        chunks: the chunks, in the order in which their results are yielded.
        kept: the tensors that clients kept, by client.

    Attributes:
        ahead: how many chunks may be handed out before an earlier one has answered.
        waiting: chunks that are not handed out, in the order in which they will be.
        idle: workers without a chunk.
        busy: worker and chunk of every call in progress.
        done: pickled results that wait for those of earlier chunks.
        deaths: how many workers have died with each chunk.
    """

    def __init__(
        self,
        workers: Sequence[RemoteWorker],
        replace: Callable[[RemoteWorker], RemoteWorker],
        plan: Plan,
        job: Job,
        server: Tree,
        chunks: Sequence[Chunk],
        kept: Mapping[int, Tree],
    ) -> None:
        self.replace = replace
        self.chunks = chunks
        self.send = _Sender(plan, job, server, kept)
        self.waiting = sorted(range(len(chunks)), key=lambda index: -group_size(plan.training, _clients(chunks[index])))
        self.ahead = _AHEAD * len(workers)
        self.idle = list(workers)
        self.busy: dict[Future[Any], tuple[RemoteWorker, int]] = {}
        self.done: dict[int, bytes] = {}
        self.deaths: Counter[int] = Counter()

    def results(self) -> Iterator[Any]:
        """Yields the groups' results in order."""
        ready = 0
        while ready < len(self.chunks):
            self._send_some(ready)
            while ready in self.done:
                yield from pickle.loads(self.done.pop(ready))
                ready += 1
            if self.busy:
                for future in wait(self.busy, return_when=FIRST_COMPLETED).done:
                    self._take(future)

    def _send_some(self, ready: int) -> None:
        """Gives idle workers the largest chunks that are not too far ahead of ``ready``, the first missing one."""
        within = [index for index in self.waiting if index < ready + self.ahead]
        for index, worker in zip(within, list(self.idle), strict=False):
            self.idle.remove(worker)
            self.waiting.remove(index)
            self.busy[self.send(worker, self.chunks[index])] = worker, index

    def _take(self, future: Future[Any]) -> None:
        """Takes a worker's answer, or replaces a worker that died."""
        worker, index = self.busy.pop(future)
        try:
            self.done[index] = worker.result(future)
        except WorkerDied as death:
            self.deaths[index] += 1
            if self.deaths[index] == _TRIES:
                raise MisconfigurationException(_dead(_clients(self.chunks[index]), death)) from death
            self.waiting.insert(0, index)
            worker = self.replace(worker)
        self.idle.append(worker)


class _Sender:
    """Sends a round's chunks; the phase and the server's state are pickled once and sent to workers that lack them."""

    def __init__(self, plan: Plan, job: Job, server: Tree, kept: Mapping[int, Tree]) -> None:
        self.plan = plan
        self.job = job
        self.kept = kept
        self.server = dumps(server)
        self.phase: bytes | None = None

    def __call__(self, worker: RemoteWorker, chunk: Chunk) -> Future[Any]:
        phase = server = None
        if worker.plan is not self.plan:
            phase = self.phase = self.phase or self._pickled_phase()
            worker.plan = self.plan
        if worker.server is not self.server:
            server = worker.server = self.server
        kept = {client: self.kept[client] for client in _clients(chunk) if client in self.kept}
        return worker.submit(phase, server, dumps((self.job, chunk, kept)))

    def _pickled_phase(self) -> bytes:
        phase = PhaseMessage(self.plan)
        return sendable("the model or its algorithm", lambda: dumps(phase, self.plan.training.datamodule))
