"""Groups of clients handed out to worker processes, whatever starts these processes."""

from __future__ import annotations

import gc
import io
import pickle
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import Any

import cloudpickle
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI
from torch import Tensor

from fedmoe_pl.backends.backend import Backend, GroupUpdate, LocalTraining, Plan
from fedmoe_pl.backends.client import data_on
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.trees import Tree

WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # glibc hands the buffers of large batches back to the system at every step: 15 to 35 percent of a step on a CPU
    "MALLOC_MMAP_THRESHOLD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_TOP_PAD_": "67108864",
}
"""Environment of a worker process, which libraries read when they are loaded."""

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
        send = _Sender(plan, server, kept, round)
        waiting = sorted(range(len(groups)), key=lambda index: -group_size(plan.training, groups[index]))
        idle, busy = list(self.workers), dict[Future[Any], tuple[RemoteWorker, int]]()
        done: dict[int, bytes] = {}
        deaths: Counter[int] = Counter()
        ready = 0
        try:
            while ready < len(groups):
                within = [index for index in waiting if index < ready + _AHEAD * len(self.workers)]
                for index, worker in zip(within, list(idle), strict=False):
                    idle.remove(worker)
                    waiting.remove(index)
                    busy[send(worker, groups[index])] = worker, index
                while ready in done:
                    yield pickle.loads(done.pop(ready))
                    ready += 1
                if not busy:
                    continue
                for future in wait(busy, return_when=FIRST_COMPLETED).done:
                    worker, index = busy.pop(future)
                    try:
                        done[index] = worker.result(future)
                    except WorkerDied as death:
                        deaths[index] += 1
                        if deaths[index] == _TRIES:
                            raise MisconfigurationException(_dead(groups[index], death)) from death
                        waiting.insert(0, index)
                        worker = self._replace(worker)
                    idle.append(worker)
        finally:
            if busy:  # after an exception nobody waits for these
                self.close()

    def _replace(self, worker: RemoteWorker) -> RemoteWorker:
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


class Worker:
    """What lives in a worker process.

    Args:
        datamodule: who holds which data.
        device: where it trains.
    """

    def __init__(self, datamodule: FederatedDataModule, device: torch.device) -> None:
        self.datamodule = data_on(datamodule, device)
        self.device = device
        # loky collects garbage after every call, and looking through all that was imported took 20 percent of a round
        gc.freeze()

    def train_group(self, phase: bytes | None, server: bytes | None, group: bytes) -> bytes:
        """Trains a group and folds its updates.

        Args:
            phase: a pickled ``_Phase``; None for the last one.
            server: the pickled state of the server; None for the last one.
            group: the pickled clients, what they have kept, and the round.

        Returns:
            The pickled ``GroupUpdate``.
        """
        try:
            if phase is not None:
                self._begin_phase(loads(phase, self.datamodule))
            if server is not None:
                self.server = pickle.loads(server)
            update = self.plan.train_group(self.server, *pickle.loads(group))
            return dumps(update)
        except Exception as error:
            raise _portable(error) from error

    def _begin_phase(self, phase: _Phase) -> None:
        phase.apply_settings()
        training = phase.plan.training
        on_cpu = training.trainer.get("accelerator") == "cpu"  # also where a cluster has GPUs
        self.plan = phase.plan.begin(replace(training, device=torch.device("cpu") if on_cpu else self.device))


_CUDNN = ("allow_tf32", "benchmark", "deterministic")


@dataclass(frozen=True)
class _Phase:
    """What a worker needs to know of a phase, with the settings of the driver's process that change results."""

    plan: Plan
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    matmul_precision: str = field(default_factory=torch.get_float32_matmul_precision)
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    warn_only: bool = field(default_factory=torch.is_deterministic_algorithms_warn_only_enabled)
    cudnn: dict[str, Any] = field(
        default_factory=lambda: {name: getattr(torch.backends.cudnn, name) for name in _CUDNN}
    )

    def apply_settings(self) -> None:
        torch.set_default_dtype(self.default_dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        for name, value in self.cudnn.items():
            setattr(torch.backends.cudnn, name, value)


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
        phase = _Phase(self.plan)
        return sendable("the model or its algorithm", lambda: dumps(phase, self.plan.training.datamodule))


def sendable(what: str, pickled: Callable[[], Any]) -> Any:
    """What ``pickled`` returns.

    Raises:
        MisconfigurationException: with one sentence, if it cannot be pickled.
    """
    try:
        return pickled()
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RuntimeError) as error:
        raise MisconfigurationException(
            f"trainer.devices must be 1 here, because {what} cannot be sent to a worker process "
            f"({str(error).splitlines()[0]})."
        ) from error


class _Pickler(cloudpickle.Pickler):
    """Pickles by value, with classes of ``__main__`` and lambdas, and leaves out what the worker has or cannot use.

    Optimizer factories of LightningCLI hold the CLI, and with it everything that was configured.
    """

    def __init__(
        self,
        file: io.BytesIO,
        datamodule: FederatedDataModule | None,
        buffer_callback: Callable[[pickle.PickleBuffer], Any] | None,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.datamodule = datamodule

    def persistent_id(self, obj: Any) -> str | None:
        if obj is self.datamodule and obj is not None:
            return "datamodule"
        return "cli" if isinstance(obj, LightningCLI) else None

    def reducer_override(self, obj: Any) -> Any:
        # As an array, because a tensor that is a view is pickled with all that it is a view of.
        if type(obj) is Tensor and obj.device.type == "cpu" and not obj.requires_grad and obj.dtype in _NUMPY_DTYPES:
            return _from_numpy, (obj.numpy(),)
        return super().reducer_override(obj)


_NUMPY_DTYPES = {
    *(torch.float16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}


def _from_numpy(array: Any) -> Tensor:
    return torch.from_numpy(array)


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, datamodule: FederatedDataModule | None, buffers: Sequence[Any] | None) -> None:
        super().__init__(io.BytesIO(pickled), buffers=buffers)
        self.datamodule = datamodule

    def persistent_load(self, pid: str) -> Any:
        return self.datamodule if pid == "datamodule" else None


def dumps(
    obj: Any,
    datamodule: FederatedDataModule | None = None,
    buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None,
) -> bytes:
    """Pickles an object by value.

    Args:
        obj: the object.
        datamodule: what is left out, because the worker has it.
        buffer_callback: takes the large arrays, which are then left out, too.
    """
    file = io.BytesIO()
    _Pickler(file, datamodule, buffer_callback).dump(obj)
    return file.getvalue()


def loads(pickled: bytes, datamodule: FederatedDataModule | None = None, buffers: Sequence[Any] | None = None) -> Any:
    """The object that was pickled; arguments as in :func:`dumps`."""
    return _Unpickler(pickled, datamodule, buffers).load()


def _portable(error: Exception) -> Exception:
    """The exception, or its text where it could not be made again in the driver."""
    try:
        pickle.loads(dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error
