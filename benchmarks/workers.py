"""Seconds of a FedAvg round in one process and by worker processes, what is sent, and the workers' memory.

    python benchmarks/workers.py
    python benchmarks/workers.py --batch-size 64 --devices 2

The workload of ``round.py``: LeNet-5 on random images of shape (3, 32, 32), 500 samples a client, SGD. The first round
of each way pays for what is done once, and is printed but not counted. Both ways must end with the same bits.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from workload import RandomImages, make_model, restart_with_environment

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import Backend, GroupUpdate, LocalTraining, Plan, PoolBackend, TrainerBackend
from fedmoe_pl.backends.workers import workers_backend
from fedmoe_pl.backends.workers.process import LocalWorker
from fedmoe_pl.federation import Federation
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.trees import Tree

SAMPLES_PER_CLIENT = 500


class Timed(Backend):
    """Keeps the seconds of each round that another backend trains."""

    def __init__(self, devices: int) -> None:
        trainer = TrainerBackend()
        self.backend = trainer if devices == 1 else PoolBackend(trainer, devices * [torch.device("cpu")])
        self.rounds: list[float] = []

    def plan(self, training: LocalTraining) -> TimedPlan:
        """The other backend's plan, timed."""
        return TimedPlan(self.backend.plan(training), self.rounds)

    def close(self) -> None:
        """Look at the workers' memory before they end."""
        workers = self.backend.workers if isinstance(self.backend, PoolBackend) else []
        for worker in workers:
            assert isinstance(worker, LocalWorker)
            fields = Path(f"/proc/{worker.pid.result()}/smaps_rollup").read_text().splitlines()
            sizes = [line.split()[:2] for line in fields if line.startswith(("Rss", "Pss:", "Private_Dirty"))]
            print("  worker", ", ".join(f"{name} {int(size) / 1024:.0f} MiB" for name, size in sizes))
        self.backend.close()


class TimedPlan(Plan):
    """Appends the seconds of each round of another plan to a list."""

    def __init__(self, plan: Plan, rounds: list[float]) -> None:
        super().__init__(plan.training, plan.description)
        self.plan = plan
        self.rounds = rounds

    def begin(self, training: LocalTraining) -> TimedPlan:
        """The same for the phase as it begins."""
        return TimedPlan(self.plan.begin(training), self.rounds)

    def groups(self, cohort: Sequence[int]) -> list[list[int]]:
        """Those of the other plan."""
        return self.plan.groups(cohort)

    def train_groups(
        self, server: Tree, groups: Sequence[Sequence[int]], kept: Mapping[int, Tree], round: int
    ) -> list[GroupUpdate]:
        """Train groups as the other plan does."""
        return self.plan.train_groups(server, groups, kept, round)

    def train(
        self, server: Tree, groups: Sequence[list[int]], kept: Mapping[int, Tree], round: int
    ) -> Iterator[GroupUpdate]:
        """Time the round."""
        start = time.perf_counter()
        yield from self.plan.train(server, groups, kept, round)
        self.rounds.append(time.perf_counter() - start)


def measure(devices: int, options: argparse.Namespace) -> tuple[float, Tree]:
    """Run all rounds; returns the median of their seconds, and the server's state."""
    backend, sent = Timed(devices), []
    dumps = workers_backend.dumps

    def timed_dumps(*arguments: Any, **kwargs: Any) -> bytes:
        start = time.perf_counter()
        pickled = dumps(*arguments, **kwargs)
        sent.append((len(pickled), time.perf_counter() - start))
        return pickled

    workers_backend.dumps = timed_dumps
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(
            phases=[Phase("FedAvg", FedAvg("global_expert.*"), rounds=options.rounds + 1, evaluate=False)],
            trainer={"max_epochs": options.epochs, "accelerator": "cpu", "devices": 1},
            backend=backend,
            logger=False,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        data = RandomImages(options.clients, SAMPLES_PER_CLIENT, options.batch_size)
        federation.fit(make_model(gate_weight=1), data)
    workers_backend.dumps = dumps
    first, *rounds = backend.rounds
    print(f"{devices} process(es): first round {first:.2f} s, then {', '.join(f'{r:.2f}' for r in rounds)} s")
    if sent:
        size, seconds = (sum(column) / len(backend.rounds) for column in zip(*sent, strict=True))
        print(f"  pickled by the driver per round, beside the phase: {size / 1e6:.3f} MB in {1e3 * seconds:.1f} ms")
    return statistics.median(rounds), federation.run.states["FedAvg"].server


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=10)
    parser.add_argument("--epochs", type=int, default=5, help="local epochs of a client")
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3, help="counted rounds of each way")
    parser.add_argument("--devices", type=int, default=2, help="worker processes")
    options = parser.parse_args()
    restart_with_environment()
    alone, expected = measure(1, options)
    together, server = measure(options.devices, options)
    if any(not torch.equal(server[name], expected[name]) for name in expected):
        raise SystemExit("the bits differ")
    print(f"median {alone:.2f} s in one process, {together:.2f} s in {options.devices}: {alone / together:.2f} times")


if __name__ == "__main__":
    main()
