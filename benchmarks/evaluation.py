"""Seconds of evaluating personalized models, in one process and in several.

    python benchmarks/evaluation.py --clients 100 --images 10000 --devices 1 2
    python benchmarks/evaluation.py --clients 20 --formats contiguous channels-last

LeNet-5 on random images of shape (3, 32, 32), one model per client, each of which classifies all global test images.
The clients first train one batch alone, so that their models differ. Each number of processes has its own run, whose
first evaluation, in which processes start, is dropped. In one memory format, all must end with the same accuracies.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time

import torch
from workload import RandomImages, make_model, restart_with_environment

from fedmoe_pl.algorithms import Local
from fedmoe_pl.backends import PoolBackend, TrainerBackend
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.evaluation.results import Evaluation
from fedmoe_pl.federation import Federation
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.run import Run


class Timer(FederationCallback):
    """Seconds from the end of the last client's training to the end of the evaluation, in every round."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def on_client_end(self, run: Run, phase: Phase, round: int, client: int) -> None:
        """Start the clock again."""
        self.start = time.perf_counter()

    def on_evaluation_end(self, run: Run, phase: Phase, evaluation: Evaluation) -> None:
        """Stop it."""
        self.seconds.append(time.perf_counter() - self.start)


def measure(devices: int, channels_last: bool, data: RandomImages, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of each round's evaluation but the first, and the clients' accuracies."""
    timer, cpus = Timer(), devices * [torch.device("cpu")]
    backend = TrainerBackend() if devices == 1 else PoolBackend(TrainerBackend(), cpus)
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(
            phases=[Phase("Local", Local("global_expert.*"), rounds=rounds + 1)],
            trainer={"max_epochs": 1, "accelerator": "cpu", "devices": 1 if devices == 1 else "auto"},
            backend=backend,
            callbacks=[timer],
            logger=False,
            default_root_dir=folder,
            enable_checkpointing=False,
            enable_progress_bar=False,
        )
        results = federation.fit(make_model(1, channels_last=channels_last), data)
    return timer.seconds[1:], [client.global_test for client in results["Local"].clients]


def main() -> None:
    """Read the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2], help="numbers of processes")
    parser.add_argument("--formats", nargs="+", choices=["contiguous", "channels-last"], default=["contiguous"])
    parser.add_argument("--rounds", type=int, default=2, help="counted evaluations of each")
    options = parser.parse_args()
    restart_with_environment()
    data = RandomImages(options.clients, samples_per_client=10, batch_size=10, num_test=options.images)
    data.setup()
    first = None
    for memory_format in options.formats:
        expected = None
        for devices in options.devices:
            seconds, accuracies = measure(devices, memory_format == "channels-last", data, options.rounds)
            expected = expected or accuracies
            if accuracies != expected:
                raise SystemExit("the accuracies differ: they were not the same models")
            median = statistics.median(seconds)
            first = first or median
            print(f"{memory_format}, {devices} processes: median {median:.2f} s, {first / median:.2f} times the first")


if __name__ == "__main__":
    main()
