"""Start-up, seconds per round and memory of 1,000 and of 100,000 clients, and how long it takes to share out samples.

    python benchmarks/scale.py --clients 1000 100000 --rounds 50

Ten clients train in a round, and each keeps a local expert of 0.6 MiB. Each line of the tables comes from a process of
its own. "start-up" goes from the call of ``fit`` to the first round; the seconds of a round are the median of the first
and of the last ten rounds; "peak" is the most memory that the run took on top of what was there before ``fit``: data (a
copy of the samples, and who holds them), what clients keep in memory, and the rest. The second table shares 10 million
labels out among 100,000 clients.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial

import torch
from torch import nn
from workload import memory, reset_peak_memory

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.data import IID, Arrays, Dirichlet, FederatedDataModule, NaturalIds, Partitioner
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import ConstantGate, PersonalizedMoE
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import Run

SAMPLES_PER_CLIENT = 10
ROUNDS = ("clients", "store", "start-up s", "round s", "last s", "peak MiB", "data MiB", "kept MiB", "last.ckpt MiB")
PARTITIONS = ("partitioner", "held out", "seconds", "peak MiB", "stays MiB")


class RandomVectors(FederatedDataModule):
    """Random vectors of eight numbers in ten classes.

    Args:
        num_samples: number of training samples.
        num_clients: number of clients, also where they have ids.
        partitioner: who gets which samples.
        held_out: share of each client's samples that is held out for its own test, and the same for validation.
        features: numbers per sample.
    """

    def __init__(
        self, num_samples: int, num_clients: int, partitioner: Partitioner, held_out: float = 0.0, features: int = 8
    ) -> None:
        natural = isinstance(partitioner, NaturalIds)
        super().__init__(None if natural else num_clients, partitioner, 10, held_out, held_out)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(num_samples, features, generator=generator)
        y = torch.randint(10, (num_samples,), generator=generator)
        ids = torch.randint(num_clients, (num_samples,), generator=generator).numpy() if natural else None
        self.arrays = Arrays(x, y, x[:100], y[:100], client_train=ids)

    def load(self) -> Arrays:
        """Return the vectors."""
        return self.arrays


class Clock(FederationCallback):
    """Notes when every round starts and ends, and how large its checkpoint is."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.seconds: list[float] = []
        self.checkpoint = 0

    def on_round_start(self, run: Run, phase: Phase, round: int) -> None:
        """Note the start."""
        self.starts.append(time.perf_counter())

    def on_round_end(self, run: Run, phase: Phase, round: int) -> None:
        """Note the end, after the checkpoint."""
        self.seconds.append(time.perf_counter() - self.starts[-1])
        self.checkpoint = sum(path.stat().st_size for path in (run.folder / "checkpoints").glob("last.ckpt"))


def measure_rounds(clients: int, store: str, rounds: int) -> None:
    """Run ten clients per round and print a line of the table."""
    data = RandomVectors(clients * SAMPLES_PER_CLIENT, clients, IID())
    torch.manual_seed(0)
    expert = nn.Sequential(nn.Linear(8, 8192), nn.ReLU(), nn.Linear(8192, 10))
    optimizer = partial(torch.optim.SGD, lr=0.01)
    model = PersonalizedMoE(expert, gate=ConstantGate(0.5), optimizer=optimizer)
    phase = Phase("FedAvg", FedAvg("global_expert.*"), rounds=rounds, clients_per_round=10, evaluate=False)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(
            phases=[phase],
            trainer={"max_epochs": 1, "accelerator": "cpu"},
            callbacks=[clock],
            logger=False,
            default_root_dir=folder,
            enable_progress_bar=False,
            enable_checkpointing=store == "files",
        )
        before = memory("VmRSS")
        reset_peak_memory()
        start = time.perf_counter()
        federation.fit(model, data)
        peak = memory("VmHWM") - before
        kept = federation.run.states["FedAvg"].clients
        size = sum(tensor.nbytes for tree in kept.values() for tensor in tree.values())
    first, end = statistics.median(clock.seconds[:10]), statistics.median(clock.seconds[-10:])
    tensors = (data.x, data.y, data.train_samples.indices, data.train_samples.sizes, data.class_shares)
    sizes = (sum(tensor.nbytes for tensor in tensors), size, clock.checkpoint)
    row = (clock.starts[0] - start, first, end, peak, *(number / 2**20 for number in sizes))
    print(f"{clients:>14}{store:>14}" + "".join(f"{value:>14.2f}" for value in row), flush=True)


def measure_partition(partitioner: Partitioner, held_out: float, samples: int, clients: int) -> None:
    """Share out samples and print a line of the table."""
    data = RandomVectors(samples, clients, partitioner, held_out, features=1)
    before = memory("VmRSS")
    reset_peak_memory()
    start = time.perf_counter()
    data.setup()
    row = (time.perf_counter() - start, memory("VmHWM") - before, memory("VmRSS") - before)
    name = f"{type(partitioner).__name__}{getattr(partitioner, 'alpha', '')}"
    print(f"{name:>14}{2 * held_out:>14.0%}" + "".join(f"{value:>14.1f}" for value in row), flush=True)


def main() -> None:
    """Measure everything, each line in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1000, 100_000])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument(
        "--only",
        nargs=2,
        metavar=("CLIENTS", "STORE"),
        help="one line of the first table; a store is files or, without checkpoints, memory",
    )
    parser.add_argument("--partition", nargs=2, metavar=("NAME", "HELD_OUT"), help="one line of the second table")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only:
        measure_rounds(int(options.only[0]), options.only[1], options.rounds)
        return
    partitioners = {"IID": IID(), "Dirichlet": Dirichlet(0.5), "NaturalIds": NaturalIds()}
    if options.partition:
        name, held_out = options.partition
        measure_partition(partitioners[name], float(held_out), samples=10_000_000, clients=100_000)
        return
    command = [sys.executable, __file__, "--rounds", str(options.rounds)]
    print("".join(f"{column:>14}" for column in ROUNDS), flush=True)
    for store in ("files", "memory"):
        for clients in options.clients:
            subprocess.run([*command, "--only", str(clients), store], check=True)
    print("\n" + "".join(f"{column:>14}" for column in PARTITIONS), flush=True)
    for name in partitioners:
        for held_out in ("0", "0.1"):
            subprocess.run([*command, "--partition", name, held_out], check=True)


if __name__ == "__main__":
    main()
