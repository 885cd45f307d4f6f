"""Worker processes in a Ray cluster."""

from __future__ import annotations

import importlib
import os
import pickle
import socket
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Literal

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.backends.auto import AutoBackend
from fedmoe_pl.backends.backend import Backend
from fedmoe_pl.backends.workers.pickling import Pickled, dumps, loads
from fedmoe_pl.backends.workers.workers_backend import (
    WORKER_ENVIRONMENT,
    RemoteWorker,
    Worker,
    WorkerDied,
    WorkersBackend,
)
from fedmoe_pl.checks import check_at_least, reason_of
from fedmoe_pl.data import FederatedDataModule

_SECONDS_TO_CONNECT = 5.0  # Ray itself would keep trying for five minutes and then end this process


def _ray() -> Any:
    """Ray, which is an optional dependency and takes a second to import."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise MisconfigurationException('RayBackend needs Ray: pip install ".[ray]" in the repository.') from error
    return ray


@contextmanager
def _on_this_machine_only() -> Iterator[None]:
    """Has Ray listen on the loopback interface only, as it does on systems where it does not support clusters.

    By default, it listens on all interfaces, even if it is given the address of the loopback interface.
    """
    constants: Any = importlib.import_module("ray._private.ray_constants")
    before, variable = constants.ENABLE_RAY_CLUSTER, constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    of_processes = os.environ.get(variable)
    constants.ENABLE_RAY_CLUSTER, os.environ[variable] = False, "0"
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = before
        if of_processes is None:
            del os.environ[variable]
        else:
            os.environ[variable] = of_processes


class RayBackend(WorkersBackend):
    """One process per GPU of a Ray cluster, or per CPU if it has no GPU.

    Results are bit-identical to training in one process if all machines have the same kind of processor.

    Args:
        address: the cluster's address, as ``host:port``, ``ray://host:port`` or ``auto``; ``local`` starts Ray on this
            machine, out of reach of other machines. None uses the environment variable ``RAY_ADDRESS``, which
            ``ray job submit`` sets, or ``local`` if it is not set.
        workers: number of processes; None for one per GPU, or per CPU if there is no GPU.
        backend: how each process trains its groups; ``auto`` takes the fastest backend that gives the right result.

    Raises:
        MisconfigurationException: if Ray is not installed or ``workers`` is out of range.
    """

    def __init__(
        self, address: str | None = None, workers: int | None = None, backend: Backend | Literal["auto"] = "auto"
    ) -> None:
        super().__init__(AutoBackend() if backend == "auto" else backend, where=", in workers of Ray")
        _ray()
        check_at_least(self, "workers", workers, 1)
        self.address = address
        self.num_workers = workers
        self._connected = False

    def open(self) -> None:
        """Connects to the cluster, or starts one.

        Raises:
            MisconfigurationException: if there is no cluster or it has too few devices.
        """
        ray = _ray()
        if not ray.is_initialized():
            self._connect()
            self._connected = True
        resources = ray.cluster_resources()
        gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
        number = self.num_workers or gpus or cpus
        # a worker sees only the GPU that Ray gives it
        self.devices = number * [torch.device("cuda", 0) if gpus else torch.device("cpu")]
        if number > (gpus or cpus) or not number:
            raise MisconfigurationException(
                f"RayBackend: workers is {self.num_workers}, but the cluster has {gpus or cpus} "
                f"{'GPUs' if gpus else 'CPUs'}."
            )

    def _connect(self) -> None:
        ray = _ray()
        options = {"include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        address = self.address or os.environ.get("RAY_ADDRESS") or "local"
        is_local = address == "local"
        host, _, port = address.removeprefix("ray://").rpartition(":")
        try:
            if host:
                socket.create_connection((host, int(port)), _SECONDS_TO_CONNECT).close()
            with _on_this_machine_only() if is_local else nullcontext():
                ray.init(address, **options)
        except Exception as error:  # Ray raises a plain one, for example if a slow machine does not start it in time
            with suppress(Exception):
                ray.shutdown()  # ends what was started
            problem = "Ray did not start on this machine" if is_local else "there is no Ray cluster to connect to"
            reason = reason_of(error)
            name, value = ("address", self.address) if self.address or is_local else ("RAY_ADDRESS", address)
            raise MisconfigurationException(f"RayBackend: {name} is {value!r}, but {problem} ({reason}).") from error

    def start(self, datamodule: FederatedDataModule) -> None:
        """Connects to the cluster, and starts all workers if they are not running."""
        self.open()
        super().start(datamodule)

    def share(self, obj: Any, datamodule: FederatedDataModule | None = None) -> Any:
        """Puts an object into the cluster's object store, which workers on one machine share."""
        buffers: list[np.ndarray] = []

        def keep(buffer: pickle.PickleBuffer) -> None:
            buffers.append(np.frombuffer(buffer.raw(), np.uint8))  # Ray shares only arrays between processes

        return _ray().put((dumps(obj, datamodule, buffer_callback=keep), buffers))

    def start_worker(self, device: torch.device) -> RemoteWorker:
        """Starts a process on a device that Ray chooses."""
        return _Actor(self.data, device)

    def close(self) -> None:
        """Ends the workers, and the connection to Ray if this backend made it."""
        super().close()
        if self._connected:
            _ray().shutdown()
        self._connected = False

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the connection, which belongs to this process."""
        return {**super().__getstate__(), "_connected": False}


class _Actor(RemoteWorker):
    """A process started by Ray."""

    def __init__(self, data: Any, device: torch.device) -> None:
        super().__init__(device)
        place = _ray().remote(
            num_cpus=1, num_gpus=int(device.type == "cuda"), runtime_env={"env_vars": WORKER_ENVIRONMENT}
        )
        self.actor = place(_RayWorker).remote(sys.path, data, device)

    def submit(self, phase: Any, server: bytes | None, groups: bytes) -> Future[Any]:
        return self.actor.work.remote(phase, server, groups).future()

    def result(self, future: Future[Any]) -> bytes:
        ray = _ray()
        try:
            return future.result()
        except (ray.exceptions.RayActorError, ray.exceptions.OutOfMemoryError) as error:
            raise WorkerDied(type(error).__name__) from error
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def end(self) -> None:
        _ray().kill(self.actor)


class _RayWorker:
    """The worker's end: makes a worker from the data in the object store."""

    def __init__(self, paths: Sequence[str], data: Pickled, device: torch.device) -> None:
        sys.path += [path for path in paths if path not in sys.path]  # where the driver found the user's modules
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # shared arrays are only read
        pickled, buffers = data
        self.worker = Worker(loads(pickled, buffers=buffers), device)

    def work(self, phase: Pickled | None, server: bytes | None, groups: bytes) -> bytes:
        if phase is not None:  # copied, because a model, unlike the data, may be written to
            phase = phase[0], [buffer.copy() for buffer in phase[1]]
        return self.worker.work(phase, server, groups)
