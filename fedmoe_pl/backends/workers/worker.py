"""The code that runs in a worker process."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from fedmoe_pl.backends.failures import portable
from fedmoe_pl.backends.local_client import data_on
from fedmoe_pl.backends.rounding import precisions, set_backend
from fedmoe_pl.backends.workers.pickling import Pickled, dumps, loads
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

_CUDNN = ("benchmark", "deterministic")


def torch_settings() -> list[Callable[[], None]]:
    """The settings of this process that affect results, as calls that make them in another process."""
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    return [
        partial(torch.set_default_dtype, torch.get_default_dtype()),
        partial(torch.use_deterministic_algorithms, is_deterministic, warn_only=warn_only),
        *(partial(set_backend, f"cudnn.{name}", getattr(torch.backends.cudnn, name)) for name in _CUDNN),
        *(partial(each.set, each.value) for each in precisions()),
    ]


class Worker:
    """Does the work in a worker process."""

    def __init__(self, datamodule: FederatedDataModule, device: torch.device) -> None:
        self.datamodule = data_on(datamodule, device)
        self.device = device

    def work(self, phase: Pickled | None, server: bytes | None, groups: bytes) -> bytes:
        """Does a job for some groups of clients; phase and server's state are those of the last call if left out."""
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
        on_cpu = plan.training.trainer.get("accelerator") == "cpu"  # even if the cluster has GPUs
        self.plan = plan.begin(replace(plan.training, device=torch.device("cpu") if on_cpu else self.device))
