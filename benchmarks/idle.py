"""What the check for values that are not finite, and the ledger of what is sent, cost in a round.

    python benchmarks/idle.py

The rounds of one run take turns, in random order: without both, without both again (the noise of the measurement), with
the check, with the check and the ledger. They are as short as can be, so that the shares are the largest: a small
mixture on digits, a single step of each client, no checkpoints. Each line has the median CPU time of the rounds of its
kind, and the median of what they take more than the first kind in the same turn, in percent. Below them is the share of
the CPU time of the rounds with the check that is spent in the check, which is less noisy.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
import timeit
from functools import partial
from typing import Any

import torch

import fedmoe_pl.backends.local_client
import fedmoe_pl.rounds.fit
from fedmoe_pl import Federation, PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import LocalTraining, StackedBackend, TrainerBackend
from fedmoe_pl.backends.traffic import TransferLog
from fedmoe_pl.callbacks import TrafficLedger
from fedmoe_pl.data import IID, Digits
from fedmoe_pl.models import ConstantGate, SmallMLP
from fedmoe_pl.rounds.run import Run

KINDS = {"neither": (False, False), "neither again": (False, False), "check": (True, False), "both": (True, True)}
WARM_UP = 20  # rounds


class Turns(TrafficLedger):
    """Switches the check and the ledger off and on from round to round, and notes the CPU time of each."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {kind: [] for kind in KINDS}
        self.turn: list[str] = []
        self.random = random.Random(0)
        self.kind, self.start, self.checking = "", 0.0, 0.0
        self.training: LocalTraining
        self.check = fedmoe_pl.rounds.fit.check_finite

    def on_fit_start(self, run: Run) -> None:
        """Gets hold of what says whether transfers are recorded."""
        super().on_fit_start(run)
        make: Any = run.local_training

        def local_training(*arguments: Any) -> Any:
            self.training = make(*arguments)
            return self.training

        setattr(run, "local_training", local_training)  # noqa: B010

    def on_round_start(self, run: Run, phase: Phase, round: int) -> None:
        """Switches."""
        if not self.turn:
            self.turn = self.random.sample([*KINDS], len(KINDS))
        self.kind = self.turn.pop()
        checked, recorded = KINDS[self.kind]
        check = self.timed_check if checked else lambda *_: None
        fedmoe_pl.backends.local_client.check_finite = fedmoe_pl.rounds.fit.check_finite = check
        run.records_transfers = recorded
        object.__setattr__(self.training, "record_transfers", recorded)
        self.start = time.process_time()

    def timed_check(self, *arguments: Any) -> None:
        """The check."""
        start = time.process_time()
        self.check(*arguments)
        self.checking += time.process_time() - start

    def on_round_end(self, run: Run, phase: Phase, round: int) -> None:
        """Notes the time."""
        if round < WARM_UP:
            self.checking = 0.0
        else:
            self.times[self.kind].append(time.process_time() - self.start)


def measure(backend: Any, clients: int, rounds: int) -> None:
    """Train once, and print a line for each kind of round."""
    torch.manual_seed(0)
    turns = Turns()
    with tempfile.TemporaryDirectory() as folder:
        Federation(
            [Phase("FedAvg", FedAvg("global_expert.*"), rounds=rounds, gate=ConstantGate(0.5))],
            {"accelerator": "cpu", "devices": 1},
            backend=backend,
            callbacks=[turns],
            logger=False,
            default_root_dir=folder,
            enable_progress_bar=False,
            evaluate_every_n_rounds=0,
            enable_checkpointing=False,
        ).fit(
            PersonalizedMoE(SmallMLP(hidden_features=8), optimizer=partial(torch.optim.SGD, lr=0.01)),
            Digits(num_clients=clients, partitioner=IID(), batch_size=400),
        )
    for kind, times in turns.times.items():
        more = statistics.median(b / a - 1 for a, b in zip(turns.times["neither"], times, strict=False))
        milliseconds = 1000 * statistics.median(times)
        print(f"{type(backend).__name__:16}{kind:16}{milliseconds:8.2f}{100 * more:8.2f}", flush=True)
    checked = sum(sum(turns.times[kind]) for kind, (checks, _) in KINDS.items() if checks)
    print(f"{type(backend).__name__}: {100 * turns.checking / checked:.2f} % of the rounds is the check", flush=True)


def main() -> None:
    """Measure both backends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("backend         round               ms percent")
    for backend in (TrainerBackend(), StackedBackend()):
        measure(backend, options.clients, options.rounds)
    calls, log = 10**6, TransferLog(active=False)
    seconds = timeit.timeit(lambda: log.add("up", 0, {}), number=calls) / calls
    print(f"A call of the ledger that is switched off, of which a client has two or three: {1e6 * seconds:.2f} µs")


if __name__ == "__main__":
    main()
