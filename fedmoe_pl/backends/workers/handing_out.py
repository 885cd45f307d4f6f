"""Hands out chunks of groups to workers, and collects their results in order."""

from __future__ import annotations

import math
import pickle
import time
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
_GRACE = 60.0  # seconds beyond the clients' own in which a worker must answer; it may have to start first
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
        """The result of a finished call."""

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

    Attributes:
        chunks: the chunks by their keys.
        order: the keys of the chunks without a yielded result, in order.
        ahead: how many chunks may be handed out before an earlier one has answered.
        waiting: chunks that are not handed out, in the order in which they will be.
        idle: workers without a chunk.
        busy: worker and chunk of every call in progress, and when it must have answered.
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
        give_up: Callable[[Chunk, str], list[Any]] | None = None,
    ) -> None:
        self.replace = replace
        self.chunks = dict(enumerate(chunks))
        self.order = [*self.chunks]
        self.plan, self.job, self.kept = plan, job, kept
        self.server = dumps(server)
        self.phase: bytes | None = None  # pickled once, and sent to workers that lack it, as the server's state is
        self.give_up = give_up
        self.seconds = plan.training.client_timeout if give_up else None
        self.waiting = sorted(self.order, key=lambda key: -group_size(plan.training, _clients(chunks[key])))
        self.ahead = _AHEAD * len(workers)
        self.idle = list(workers)
        self.busy: dict[Future[Any], tuple[RemoteWorker, int, float]] = {}
        self.done: dict[int, bytes] = {}
        self.deaths: Counter[int] = Counter()

    def results(self) -> Iterator[Any]:
        """Yields the groups' results in order."""
        while self.order:
            self._send_some()
            while self.order and self.order[0] in self.done:
                yield from pickle.loads(self.done.pop(self.order.pop(0)))
            if self.busy:
                soonest = min(deadline for _, _, deadline in self.busy.values())
                patience = None if soonest == math.inf else max(0.0, soonest - time.monotonic())
                for future in wait(self.busy, patience, FIRST_COMPLETED).done:
                    self._take(future)
                self._end_overdue()

    def _send_some(self) -> None:
        """Gives idle workers the largest chunks that are not too far ahead of the first missing one."""
        first = {*self.order[: self.ahead]}
        within = [key for key in self.waiting if key in first]
        for key, worker in zip(within, list(self.idle), strict=False):
            self.idle.remove(worker)
            self.waiting.remove(key)
            chunk = self.chunks[key]
            seconds = math.inf if self.seconds is None else self.seconds * len(_clients(chunk)) + _GRACE
            self.busy[self._send(worker, chunk)] = worker, key, time.monotonic() + seconds

    def _send(self, worker: RemoteWorker, chunk: Chunk) -> Future[Any]:
        phase = server = None
        if worker.plan is not self.plan:
            message, datamodule = PhaseMessage(self.plan), self.plan.training.datamodule
            if self.phase is None:
                self.phase = sendable("the model or its algorithm", lambda: dumps(message, datamodule))
            phase, worker.plan = self.phase, self.plan
        if worker.server is not self.server:
            server = worker.server = self.server
        kept = {client: self.kept[client] for client in _clients(chunk) if client in self.kept}
        return worker.submit(phase, server, dumps((self.job, chunk, kept)))

    def _take(self, future: Future[Any]) -> None:
        """Takes a worker's answer, or replaces a worker that died."""
        worker, key, _ = self.busy.pop(future)
        try:
            self.done[key] = worker.result(future)
        except WorkerDied as death:
            self.deaths[key] += 1
            self._try_again(key, death)
            worker = self.replace(worker)
        self.idle.append(worker)

    def _try_again(self, key: int, death: WorkerDied) -> None:
        """Puts a chunk back whose worker died; before the last try, its groups are parted, so that only one fails."""
        chunk = self.chunks[key]
        if self.deaths[key] == _TRIES:
            if self.give_up is None:
                raise MisconfigurationException(_dead(_clients(chunk), death)) from death
            self.done[key] = dumps(self.give_up(chunk, f"its worker process has ended {_TRIES} times ({death})"))
        elif self.deaths[key] == _TRIES - 1 and len(chunk) > 1:
            keys = [*range(len(self.chunks), len(self.chunks) + len(chunk))]
            self.chunks |= {new: [group] for new, group in zip(keys, chunk, strict=True)}
            self.deaths.update(dict.fromkeys(keys, self.deaths[key]))
            place = self.order.index(key)
            self.order[place : place + 1] = keys
            self.waiting[:0] = keys
        else:
            self.waiting.insert(0, key)

    def _end_overdue(self) -> None:
        """Ends the workers that have not answered in time; a client hangs where nothing else interrupts it."""
        for future, (worker, key, deadline) in list(self.busy.items()):
            if time.monotonic() >= deadline:
                del self.busy[future]
                assert self.give_up is not None, "only then is there a deadline"
                reason = (
                    f"its worker process did not answer within failures.timeout, {self.seconds:g} s for each client"
                )
                self.done[key] = dumps(self.give_up(self.chunks[key], reason))
                self.idle.append(self.replace(worker))
