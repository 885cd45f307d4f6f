"""The code that runs in a worker process."""

from __future__ import annotations

import gc
import pickle
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedmoe_pl.backends.backend import Plan
from fedmoe_pl.backends.client import data_on
from fedmoe_pl.backends.workers.pickling import dumps, loads, portable
from fedmoe_pl.data import FederatedDataModule

WORKER_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    # otherwise glibc returns the buffers of large batches to the system in every step: 15 to 35 percent of its time
    "MALLOC_MMAP_THRESHOLD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_TOP_PAD_": "67108864",
}
"""Environment of a worker process, which libraries read when they are loaded."""

_CUDNN = ("allow_tf32", "benchmark", "deterministic")


@dataclass(frozen=True)
class PhaseMessage:
    """A phase as it is sent to a worker: the plan, and the settings of the driver's process that affect results."""

    plan: Plan
    default_dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    matmul_precision: str = field(default_factory=torch.get_float32_matmul_precision)
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    warn_only: bool = field(default_factory=torch.is_deterministic_algorithms_warn_only_enabled)
    cudnn: dict[str, Any] = field(
        default_factory=lambda: {name: getattr(torch.backends.cudnn, name) for name in _CUDNN}
    )

    def apply_settings(self) -> None:
        """Applies the driver's settings in this process."""
        torch.set_default_dtype(self.default_dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.warn_only)
        for name, value in self.cudnn.items():
            setattr(torch.backends.cudnn, name, value)


class Worker:
    """Does the work in a worker process."""

    def __init__(self, datamodule: FederatedDataModule, device: torch.device) -> None:
        self.datamodule = data_on(datamodule, device)
        self.device = device
        # loky collects garbage after every call; over all imported objects, that took 20 percent of a round
        gc.freeze()

    def work(self, phase: bytes | None, server: bytes | None, groups: bytes) -> bytes:
        """Does a job for some groups of clients."""
        try:
            if phase is not None:
                self._begin_phase(loads(phase, self.datamodule))
            if server is not None:
                self.server = pickle.loads(server)
            job, chunk, kept = pickle.loads(groups)
            return dumps(job(self.plan, self.server, chunk, kept))
        except Exception as error:
            raise portable(error) from error

    def _begin_phase(self, phase: PhaseMessage) -> None:
        phase.apply_settings()
        training = phase.plan.training
        on_cpu = training.trainer.get("accelerator") == "cpu"  # even if the cluster has GPUs
        self.plan = phase.plan.begin(replace(training, device=torch.device("cpu") if on_cpu else self.device))
