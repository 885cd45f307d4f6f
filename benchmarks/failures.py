"""Clients fail and a worker process is killed again and again: what does it cost in accuracy, and is all of it counted?

    python benchmarks/failures.py

In every round of FedAvg, a fifth of the clients fail: the training of some raises an exception, others get weights that
are not a number. Every few rounds, SIGKILL ends one of the two worker processes while it trains; it is replaced, its
work is done again, and no client must fail of it. Then each client makes a mixture of the result and a local expert.
For each seed, a run with all of that is compared with one without; both have the same data and initial models. The
accuracies, ``reweighted_test`` in percent, are those of FedAvg and of the mixtures. "planted" counts the failures that
this script caused, "failed" is the column of ``rounds.csv``, and "kills" counts the processes that were killed.
"""

from __future__ import annotations

import argparse
import csv
import logging
import os
import random
import signal
import statistics
import tempfile
import threading
import time
import warnings
from functools import partial
from typing import Any

import torch

from fedmoe_pl import Evaluate, Federation, PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg, FineTuning, PFLMoE
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.data import Digits, Dirichlet
from fedmoe_pl.models import FeatureGate, GlobalOnly, LocalOnly, SmallMLP
from fedmoe_pl.rounds.run import Run

CLIENTS, FAILING = 20, 4  # in every round
METHODS = ("FedAvg", "PFL-MFE")


def planted(client: int, round: int, seed: int) -> str:
    """How a client fails in a round: ``raises``, ``nan``, or not at all."""
    failing = random.Random(1000 * seed + round).sample(range(CLIENTS), FAILING)
    return ("raises", "nan")[failing.index(client) % 2] if client in failing else ""


class Failing(FedAvg):
    """FedAvg whose clients fail as planted.

    Args:
        seed: the seed of the pattern.
    """

    def __init__(self, seed: int) -> None:
        super().__init__("global_expert.*")
        self.seed = seed

    def client_final(self, client: Any, constants: dict[str, Any]) -> Any:
        """Fails after the training."""
        how = planted(client.id, client.round, self.seed)
        if how == "raises":
            raise ValueError("planted")
        if how == "nan":
            with torch.no_grad():
                next(client.module.parameters()).fill_(torch.nan)
        return super().client_final(client, constants)


class Kills(FederationCallback):
    """Ends a worker process with SIGKILL in some rounds, at a random moment of their training.

    Args:
        every: in every so many rounds; 0 in none.
        seed: the seed of the moments and workers.

    Attributes:
        kills: how many processes were ended.
    """

    def __init__(self, every: int, seed: int) -> None:
        self.every = every
        self.random = random.Random(seed)
        self.kills = 0
        self.start = self.seconds = 0.0
        self.timer: threading.Timer | None = None

    def on_round_start(self, run: Run, phase: Phase, round: int) -> None:
        """Sets the time of the kill."""
        self.start = time.perf_counter()
        if self.every and round and round % self.every == 0:
            self.timer = threading.Timer(self.random.uniform(0, self.seconds), self.kill, [run.backend])
            self.timer.start()

    def on_client_end(self, run: Run, phase: Phase, round: int, client: int) -> None:
        """Notes how long the training of the round has taken so far."""
        self.seconds = time.perf_counter() - self.start

    def on_round_end(self, run: Run, phase: Phase, round: int) -> None:
        """Waits for the kill, so that no round has two."""
        if self.timer is not None:
            self.timer.join()

    def kill(self, backend: Any) -> None:
        """Ends one of the workers."""
        executor = self.random.choice(backend.workers).executor
        for process in [*executor._processes]:
            os.kill(process, signal.SIGKILL)
            self.kills += 1


def train(seed: int, rounds: int, fails: bool, every: int) -> tuple[dict[str, float], int, int]:
    """Trains once; returns accuracies in percent, the failures in ``rounds.csv``, and the number of kills."""
    torch.manual_seed(seed)
    kills = Kills(every, seed)
    algorithm = Failing(seed) if fails else FedAvg("global_expert.*")
    phases = [
        Phase("FedAvg", algorithm, rounds, gate=GlobalOnly(), evaluate=Evaluate(every_n_rounds=0)),
        Phase("PFL-FT", FineTuning(gate_fraction=0.25), gate=LocalOnly(), evaluate=False),
        Phase("PFL-MFE", PFLMoE(), gate=FeatureGate()),
    ]
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(
            phases,
            {"max_epochs": 5, "accelerator": "cpu", "devices": 2},
            backend=TrainerBackend(),
            callbacks=[kills],
            logger=False,
            default_root_dir=folder,
            enable_progress_bar=False,
            seed=seed,
        )
        results = federation.fit(
            PersonalizedMoE(SmallMLP(), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5)),
            Digits(num_clients=CLIENTS, partitioner=Dirichlet(0.5), batch_size=10, partition_seed=seed),
        )
        with (federation.run_dir / "rounds.csv").open() as file:
            failed = sum(int(row["failed"]) for row in csv.DictReader(file))  # one row for each phase
    accuracies = {method: 100 * results[method].spread("reweighted_test").mean for method in METHODS}
    return accuracies, failed, kills.kills


def main() -> None:
    """Compares both runs of each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kill-every", type=int, default=4, help="rounds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # a warning names every client that fails
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    lines = ["          undisturbed        disturbed", "seed   FedAvg  mixture   FedAvg  mixture  planted failed kills"]
    differences: dict[str, list[float]] = {method: [] for method in METHODS}
    undisturbed: dict[str, list[float]] = {method: [] for method in METHODS}
    for seed in range(options.seeds):
        before, none, _ = train(seed, options.rounds, fails=False, every=0)
        after, failed, kills = train(seed, options.rounds, fails=True, every=options.kill_every)
        assert none == 0
        for method in METHODS:
            differences[method].append(after[method] - before[method])
            undisturbed[method].append(before[method])
        accuracies = "".join(f"{value:9.2f}" for each in (before, after) for value in each.values())
        lines.append(f"{seed:4}{accuracies}{FAILING * options.rounds:9}{failed:7}{kills:6}")
    for method, of_seeds in differences.items():
        error = statistics.stdev(of_seeds) / len(of_seeds) ** 0.5
        lines.append(
            f"{method}: disturbed minus undisturbed {statistics.mean(of_seeds):+.2f}, standard error {error:.2f}; "
            f"standard deviation of the undisturbed runs {statistics.stdev(undisturbed[method]):.2f}"
        )
    print("\n".join(lines))


if __name__ == "__main__":
    main()
