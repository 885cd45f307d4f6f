"""Worker processes on this machine."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cached_property
from typing import IO, Any

import cloudpickle
import loky
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from loky.process_executor import TerminatedWorkerError

from fedmoe_pl.backends.backend import Backend, GroupUpdate, Job, group_size
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.backends.workers.backend import HandingOutPlan, WorkersBackend, parts_of
from fedmoe_pl.backends.workers.handing_out import RemoteWorker, WorkerDied
from fedmoe_pl.backends.workers.pickling import sendable
from fedmoe_pl.backends.workers.worker import WORKER_ENVIRONMENT, Worker
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.trees import Tree

# otherwise loky replaces a process that has grown by 300 MB since its first call, and loses what was sent to it
_ENVIRONMENT = {**WORKER_ENVIRONMENT, "LOKY_MAX_MEMORY_LEAK_SIZE": "1e18"}
_WORTH_STARTING = 10.0  # seconds to gain; starting takes about half of them, and the estimate is rough


class PoolBackend(WorkersBackend):
    """One process per device of this machine.

    Args:
        backend: how each of them trains its groups.
        devices: the device of each process; on a CPU the same device several times.
        lazy: whether training begins in this process. The others start when, at the pace measured so far, they are
            expected to shorten the phase by at least ten seconds. The result has the same bits.
    """

    def __init__(self, backend: Backend, devices: Sequence[torch.device], lazy: bool = False) -> None:
        super().__init__(backend)
        self.devices = list(devices)
        self.lazy = lazy
        self._data: IO[bytes] | None = None
        self._alone = False

    def plan(self, training: LocalTraining) -> PoolPlan:
        """The plan of the processes' backend, whose groups are handed out."""
        plan = self.backend.plan(training)
        return PoolPlan(self, plan, f"{plan.description}, in up to {len(self.devices)} processes")

    def starts(self, datamodule: FederatedDataModule) -> bool:
        """Starts all workers if they are not running; returns whether they run, and warns once if they cannot start."""
        if not self.workers and not self._alone:
            try:
                self.workers = self.start(datamodule)
            except MisconfigurationException as error:
                warnings.warn(f"Training continues in one process: {error}", stacklevel=2)
                self._alone = True
        return bool(self.workers)

    def start(self, datamodule: FederatedDataModule) -> list[RemoteWorker]:
        """Writes the data to a file that all workers map, and starts them."""
        # a file without a name, because it is deleted however this process ends
        self._data = data = tempfile.TemporaryFile()
        try:
            sendable("the data module", lambda: torch.save(datamodule, data, pickle_module=cloudpickle))
        except MisconfigurationException:
            self.close()
            raise
        data.flush()
        return [self._worker(device) for device in self.devices]

    def replacement(self, worker: RemoteWorker) -> RemoteWorker:
        """Starts a process on the device of the one that died."""
        assert isinstance(worker, _Process)
        return self._worker(worker.device)

    def _worker(self, device: torch.device) -> _Process:
        assert self._data is not None
        return _Process(f"/proc/{os.getpid()}/fd/{self._data.fileno()}", device)

    def close(self) -> None:
        """Ends the processes and frees the file."""
        super().close()
        if self._data is not None:
            self._data.close()
        self._data = None
        self._alone = False

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the file, which belongs to this process."""
        return {**super().__getstate__(), "_data": None}


class PoolPlan(HandingOutPlan):
    """Hands out the groups of another plan as soon as starting processes is worth the time."""

    backend: PoolBackend

    @cached_property
    def paces(self) -> list[float]:
        """Seconds per training sample, of the groups trained in this process."""
        return []

    def train(self, server: Tree, cohort: Sequence[int], kept: Mapping[int, Tree], round: int) -> Iterator[GroupUpdate]:
        """Trains groups in this process until the others take over; see :meth:`WorkersBackend.hand_out`."""
        groups = self.groups(cohort)
        begun = 0
        while begun < len(groups) and not self._hands_out(groups, begun, round):
            chunk = self.chunks(groups[begun:])[0]
            start = time.perf_counter()
            updates = self.train_groups(server, chunk, kept, round)
            size = sum(group_size(self.training, clients) for clients in chunk)
            self.paces.append((time.perf_counter() - start) / size)
            begun += len(chunk)
            yield from updates
        yield from self.backend.train(self.plan, server, groups[begun:], kept, round)

    def map(self, job: Job, server: Tree, groups: Sequence[list[int]], kept: Mapping[int, Tree]) -> Iterator[Any]:
        """Does the work in this process until the others take over; see :meth:`WorkersBackend.hand_out`."""
        backend, training = self.backend, self.training
        chunks, pace = parts_of(groups), 0.0
        while chunks and not backend.workers:
            share = 1 - 1 / len(backend.devices)
            worth_it = pace * len(chunks) * share >= _WORTH_STARTING
            if (not backend.lazy and len(groups) > 1) or (worth_it and backend.starts(training.datamodule)):
                break
            chunk = chunks.pop(0)
            start = time.perf_counter()
            results = job(self.plan, server, chunk, kept)
            pace = time.perf_counter() - start
            yield from results
        yield from backend.hand_out(self.plan, job, server, chunks, kept)

    def _hands_out(self, groups: Sequence[Sequence[int]], begun: int, round: int) -> bool:
        """Whether the other processes train the remaining groups; starts them if they are worth it."""
        training, backend = self.training, self.backend
        if len(groups) == 1 and training.device.type == "cpu":
            return False  # there is nothing to divide
        if backend.workers or not backend.lazy:
            return True
        if len(self.paces) < 2:  # the first group takes longer, because some things are done once
            return False
        remaining = sum(group_size(training, clients) for clients in groups[begun:])
        remaining += (training.rounds - round - 1) * sum(group_size(training, clients) for clients in groups)
        share = 1 - 1 / min(len(backend.devices), len(groups))
        return min(self.paces) * remaining * share >= _WORTH_STARTING and backend.starts(training.datamodule)


class _Process(RemoteWorker):
    """A process started by loky: a new interpreter, so that the user's script needs no ``__main__`` guard."""

    def __init__(self, data: str, device: torch.device) -> None:
        self.data = data
        self.device = device
        self.executor = loky.ProcessPoolExecutor(1, env=_ENVIRONMENT, initializer=_end_with, initargs=(os.getpid(),))
        # Ctrl-C is for the driver, which ends its workers. A process started while the signal is blocked never gets it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            self.executor.submit(os.getpid)  # so that it imports modules while others start
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def submit(self, phase: bytes | None, server: bytes | None, groups: bytes) -> Future[Any]:
        try:
            return self.executor.submit(_work, self.data, self.device, phase, server, groups)
        except TerminatedWorkerError as error:  # the process died while it was idle
            future: Future[Any] = Future()
            future.set_exception(error)
            return future

    def result(self, future: Future[Any]) -> bytes:
        try:
            return future.result()
        except TerminatedWorkerError as error:
            raise WorkerDied(str(error).partition("exit codes of the workers are ")[2].splitlines()[0]) from error

    def end(self) -> None:
        self.executor.shutdown(kill_workers=True)


_worker: Worker | None = None  # in a worker process


def _work(data: str, device: torch.device, phase: bytes | None, server: bytes | None, groups: bytes) -> bytes:
    """Works for some groups; runs in the worker's process."""
    global _worker
    if _worker is None:
        _worker = Worker(torch.load(data, mmap=True, weights_only=False), device)
    return _worker.work(phase, server, groups)


def _end_with(parent: int) -> None:
    """Ends this process when its parent has ended, in case the parent could not do so."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
