"""Kills a run again and again, continues it, and compares the result bit for bit with that of a run left alone.

    python benchmarks/kills.py --kills 100 --workers 2

SIGKILL ends the run and its workers when they have used a random amount of CPU time since their start-up, and every
other time as the next phase begins. A run that is left to its end is compared, and the next one begins. Clients are
trained by Trainers, and not in a stack, which one worker would do alone. Runs are forked from this process, and workers
from them, so that a start takes a tenth of a second; ``--server`` forks workers from a server of the run, as they are
in other runs.
"lost" counts the rounds that had been completed at a kill and were trained again: 1 if the kill came between the end of
a round's training and its checkpoint.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedmoe_pl import Federation, PersonalizedMoE, Phase, Select, Train
from fedmoe_pl.algorithms import FedAvg, FineTuning, PFLMoE
from fedmoe_pl.backends import Backend, PoolBackend, TrainerBackend
from fedmoe_pl.backends.workers import fork_server, process
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.checkpoints.checkpoint import load_checkpoint
from fedmoe_pl.data import Digits, Dirichlet
from fedmoe_pl.models import ConstantGate, EqualWeights, FeatureGate, GlobalOnly, LocalOnly, SmallMLP
from fedmoe_pl.rounds.run import Run

NAME = "killed"
CHECKPOINT = "checkpoints/last.ckpt"


class Rounds(FederationCallback):
    """Writes a line into a file as each round begins and as its training ends.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_round_start(self, run: Run, phase: Phase, round: int) -> None:
        """Notes the number of completed rounds of all phases."""
        with self.path.open("a") as file:
            file.write(f"{run.step}\n")

    def on_evaluation_end(self, run: Run, phase: Phase, evaluation: Any) -> None:
        """Notes that the round is complete, except for its checkpoint."""
        self.on_round_start(run, phase, 0)


def parts(folder: Path, workers: int = 1) -> tuple[Federation, PersonalizedMoE, Digits]:
    """The settings of a run in a folder, its model and data."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    mixed = {"gate": ConstantGate(0.5), "clients_per_round": 4}
    tuning = FineTuning("local_expert.classifier.*", gate_fraction=0.25)
    phases = [
        Phase("FedPer", FedAvg("global_expert.*"), rounds=12, select=Select("global_test"), **mixed),
        Phase("PFL-FB", tuning, gate=LocalOnly()),
        Phase("PFL-MF", PFLMoE(), gate=FeatureGate(), train=Train(max_epochs=3)),
        # clients keep nothing of this phase, so that the experts of the next one are equal
        Phase("FedAvg", FedAvg("global_expert.*"), rounds=5, clients_per_round=4, gate=GlobalOnly()),
        Phase("tuned", tuning, gate=LocalOnly()),
        Phase("equal weights", PFLMoE(), gate=EqualWeights(), train=Train(max_epochs=0)),
        Phase("mixture", PFLMoE(), gate=FeatureGate(), train=Train(max_epochs=3)),
    ]
    federation = Federation(
        phases,
        {"max_epochs": 2, "accelerator": "cpu", "devices": workers},
        TrainerBackend(),
        callbacks=[Rounds(folder / "rounds")],
        logger=False,
        default_root_dir=str(folder),
        name=NAME,
        enable_progress_bar=False,
    )
    model = PersonalizedMoE(SmallMLP(hidden_features=16), optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.5))
    return federation, model, Digits(num_clients=12, partitioner=Dirichlet(0.5))


def train(folder: Path, workers: int) -> None:
    """Begins the run in a folder, or continues it."""
    federation, model, data = parts(folder, workers)
    federation.fit(model, data, "last" if any(folder.rglob("*.ckpt")) else None)


def forked(function: Callable[..., None], *arguments: Any) -> int:
    """Runs a function in a process and a session of its own; returns its id."""
    process = os.fork()
    if process:
        return process
    os.setsid()
    output = os.open(os.environ.get("KILLS_LOG", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    status = 1
    try:
        function(*arguments)
        status = 0
    except BaseException as error:
        print(repr(error), flush=True)
    os._exit(status)


class ForkedWorkers:
    """Forks workers from the run instead of a server of its own."""

    def connect(self) -> socket.socket:
        """A connection to a new worker."""
        ours, theirs = socket.socketpair()
        if not os.fork():
            ours.close()
            fork_server.run_worker(process.work, theirs)
        theirs.close()
        return ours


def cpu_seconds(session: int) -> float:
    """CPU time of all living processes of a session."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def end(session: int) -> None:
    """Kills the processes of a session, and waits for the first of them."""
    os.killpg(session, signal.SIGKILL)
    os.waitpid(session, 0)


def noted(folder: Path) -> list[int]:
    """The numbers in the file of ``Rounds``."""
    path = folder / "rounds"
    return [int(line) for line in path.read_text().split()] if path.is_file() else []


def finished(folder: Path) -> int:
    """How many phases have been finished."""
    return len([*folder.rglob("finished/*.ckpt")])


def killed_at(process: int, folder: Path, seconds: float | None) -> bool:
    """Kills a run when it has used this much CPU time since its first round began, or as its next phase begins (None).

    False if it ended before.
    """
    before, start, phases, between = len(noted(folder)), 0.0, finished(folder), False
    while True:
        if os.waitpid(process, os.WNOHANG)[0]:
            return False
        if seconds is None and not between and finished(folder) > phases:
            between, before = True, len(noted(folder))
        if not start and (seconds is not None or between) and len(noted(folder)) > before:
            start = cpu_seconds(process)
        if start and cpu_seconds(process) - start >= (seconds or 0.0):
            end(process)
            return True
        time.sleep(0.002)


def content(folder: Path) -> dict[str, Any]:
    """Everything that a run has come to, with what clients keep read from disk."""
    path = folder / NAME / "version_0"
    checkpoint = load_checkpoint(path / CHECKPOINT)
    states = {}
    for name, state in checkpoint["phases"].items():
        states[name] = {**vars(state), "clients": dict(state.clients), "best_clients": dict(state.best_clients)}
    files = {name: (path / name).read_bytes() for name in ("rounds.csv", "clients.csv", "summary.csv")}
    return {**checkpoint, "phases": states, **files}


def same(one: Any, other: Any) -> bool:
    """Whether two trees are equal to the last bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one.view(torch.uint8), other.view(torch.uint8)) if one.ndim else torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "__dataclass_fields__"):
        return same(vars(one), vars(other))
    return one == other or (one != one and other != other)


def measure(workers: int, kills: int, rng: random.Random, folder: Path) -> None:
    """Kill until there have been so many kills, and the last run has ended; print a line."""
    expected, done, runs, lost = folder / "whole", 0, 0, 0
    expected.mkdir()
    process = forked(train, expected, 1)
    if os.waitpid(process, 0)[1]:
        sys.exit("the run fails without kills, too: set KILLS_LOG to see how")
    whole, differing, failed = content(expected), 0, 0
    while done < kills:
        path = folder / f"run_{runs}"
        path.mkdir()
        runs += 1
        while True:
            before = noted(path)
            process = forked(train, path, workers)
            seconds = 1e9 if done >= kills else None if done % 2 else rng.uniform(0, 1.5)
            if not killed_at(process, path, seconds):
                failed += not (path / NAME / "version_0/summary.csv").is_file()
                break
            done += 1
            after = noted(path)[len(before) :]
            if before and after:
                lost = max(lost, max(before) - after[0])
        differing += not same(content(path), whole)
    print(f"{workers:>9}{done:>7}{runs:>6}{differing + failed:>11}{lost:>6}", flush=True)


def main() -> None:
    """Kill, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--server", action="store_true")
    options = parser.parse_args()
    if not options.server:
        process.start_server, PoolBackend.open = ForkedWorkers, Backend.open
    print("  workers  kills  runs  differing  lost", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        measure(options.workers, options.kills, random.Random(0), Path(folder))


if __name__ == "__main__":
    main()
