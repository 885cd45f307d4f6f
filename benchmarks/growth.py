"""What a round costs early and late in a long run of a small federation: nothing may grow with the rounds.

    python benchmarks/growth.py --rounds 5000

Five clients train a small mixture in every round and keep their local experts. Each line is about the hundred rounds
that end with the given one: the median of this process's CPU time per round, then its memory with and without the pages
of libraries, which the kernel may drop, open files and threads, the files and the bytes in ``checkpoints/`` without
``rows.jsonl``, which gets a row per round, and ``last.ckpt``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from functools import partial
from pathlib import Path

import torch
from workload import memory

from fedmoe_pl import Federation, PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.data import IID, Digits
from fedmoe_pl.models import ConstantGate, SmallMLP
from fedmoe_pl.rounds.run import Run

COLUMNS = ("round", "CPU ms", "RSS MiB", "anon MiB", "open files", "threads", "files", "KiB", "last.ckpt")
WINDOW = 100


class Growth(FederationCallback):
    """Prints a line after each of some rounds.

    Args:
        rounds: these rounds.
    """

    def __init__(self, rounds: list[int]) -> None:
        self.rounds = rounds
        self.times = [time.process_time()]

    def on_round_end(self, run: Run, phase: Phase, round: int) -> None:
        """Notes the time."""
        self.times.append(time.process_time())
        if round + 1 in self.rounds:
            cpu = statistics.median(
                b - a for a, b in zip(self.times[-WINDOW - 1 :], self.times[-WINDOW:], strict=False)
            )
            folder = run.folder / "checkpoints"
            files = [path for path in folder.rglob("*") if path.is_file() and path.name != "rows.jsonl"]
            size = sum(path.stat().st_size for path in files)
            row = (round + 1, 1000 * cpu, memory("VmRSS"), memory("RssAnon"))
            row += (len(os.listdir("/proc/self/fd")), threading.active_count())
            row += (len(files), size / 1024, (folder / "last.ckpt").stat().st_size)
            print(
                "".join(f"{value:>12.1f}" if isinstance(value, float) else f"{value:>12}" for value in row), flush=True
            )


def main() -> None:
    """Train once."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1500)
    parser.add_argument("--logger", action="store_true", help="with TensorBoard")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shown = [WINDOW, *(rounds for rounds in (500, 1500) if rounds < options.rounds), options.rounds]
    print("".join(f"{column:>12}" for column in COLUMNS), flush=True)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        phase = Phase("FedAvg", FedAvg("global_expert.*"), rounds=options.rounds, gate=ConstantGate(0.5))
        settings = {"logger": options.logger, "default_root_dir": str(Path(folder)), "enable_progress_bar": False}
        Federation([phase], {"accelerator": "cpu", "devices": 1}, callbacks=[Growth(shown)], **settings).fit(
            PersonalizedMoE(SmallMLP(hidden_features=8), optimizer=partial(torch.optim.SGD, lr=0.01)),
            Digits(num_clients=5, partitioner=IID(), batch_size=400),
        )


if __name__ == "__main__":
    main()
