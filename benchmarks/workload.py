"""What the benchmarks have in common: random images, a model, the process's settings and its memory."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from fedmoe_pl import Federation, Phase
from fedmoe_pl.backends import StackedBackend
from fedmoe_pl.data import IID, Arrays, FederatedDataModule
from fedmoe_pl.models import VGG16, ConstantGate, LeNet5, PersonalizedMoE

# glibc hands the buffers of large batches back to the system at every step, which costs more than what is compared here
# and differs from process to process; one thread, because several stall when another process holds a core.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": "268435456",
    "MALLOC_TRIM_THRESHOLD_": "1073741824",
    "MALLOC_TOP_PAD_": "67108864",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


class RandomImages(FederatedDataModule):
    """Random images of shape (3, 32, 32) in ten classes, dealt evenly to the clients.

    Args:
        num_clients: number of clients.
        samples_per_client: training samples of each client.
        batch_size: samples per batch.
        num_test: number of test images.
    """

    def __init__(self, num_clients: int, samples_per_client: int, batch_size: int, num_test: int = 1) -> None:
        super().__init__(num_clients=num_clients, partitioner=IID(), batch_size=batch_size)
        self.num_samples = num_clients * samples_per_client
        self.num_test = num_test

    def load(self) -> Arrays:
        """Draw the images; those for training do not depend on the number of test images."""
        return Arrays(*_images(self.num_samples, seed=0), *_images(self.num_test, seed=1))


def _images(number: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(256, (number, 3, 32, 32), generator=generator, dtype=torch.uint8)
    return x, torch.randint(10, (number,), generator=generator)


def make_model(
    gate_weight: float, expert: Callable[..., LeNet5 | VGG16] = LeNet5, channels_last: bool = False
) -> PersonalizedMoE:
    """Two experts for colour images, with the papers' SGD.

    Args:
        gate_weight: weight of the global expert, the same for every sample; 1 leaves the local expert out.
        expert: makes the experts.
        channels_last: whether convolutions are in channels-last memory format.
    """
    torch.manual_seed(0)
    optimizer = partial(torch.optim.SGD, lr=0.01, momentum=0.5)
    gate = ConstantGate(gate_weight)
    return PersonalizedMoE(expert(in_channels=3), gate=gate, optimizer=optimizer, channels_last=channels_last)


def stacked_federation(phases: list[Phase], seed: int, folder: str) -> Federation:
    """Stacked clients on the CPU, evaluated at the end of each phase; it writes as little as possible."""
    return Federation(
        phases,
        seed=seed,
        trainer={"max_epochs": 1, "accelerator": "cpu", "devices": 1},
        backend=StackedBackend(),
        default_root_dir=folder,
        evaluate_every_n_rounds=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )


def restart_with_environment() -> None:
    """Replace this process by one with the settings above, which libraries read when they are loaded."""
    if any(os.environ.get(name) != value for name, value in ENVIRONMENT.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ENVIRONMENT})
    torch.set_num_threads(1)


def reset_peak_memory(accelerator: str = "cpu") -> None:
    """Let the peak of resident memory start anew (Linux), or that of the GPU's memory."""
    if accelerator == "gpu":
        gc.collect()  # a Trainer's references form cycles, which hold tensors
        torch.cuda.reset_peak_memory_stats()
    else:
        Path("/proc/self/clear_refs").write_text("5")


def peak_memory(accelerator: str) -> float:
    """The peak since :func:`reset_peak_memory` in MiB: resident memory (Linux), or the tensors in the GPU's memory."""
    return torch.cuda.max_memory_allocated() / 2**20 if accelerator == "gpu" else memory("VmHWM")


def memory(field: str) -> float:
    """Resident memory of this process in MiB: ``VmRSS`` or ``RssAnon`` now, ``VmHWM`` at its peak (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) / 1024
