"""What the harnesses of ``peers.py`` have in common; imports nothing but torch, which every environment has."""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from plain import Work
from torch import Tensor, nn


@dataclass(frozen=True)
class Task:
    """What every harness has to do.

    Attributes:
        work: what the clients hold and how they train.
        model: the start of the first round.
        seeds: a seed per round and client, for its permutations.
        workers: how many processes may train at the same time.
        test: images, shape (n, ...), and their classes, (n,), on which the model of every client is evaluated after its
            training in every round; None if nothing is evaluated.
    """

    work: Work
    model: nn.Sequential
    seeds: Sequence[Sequence[int]]
    workers: int
    test: tuple[Tensor, Tensor] | None


@functools.cache
def load_task(path: str) -> Task:
    """Read the task; its samples are mapped from the file, so that processes that train in parallel share them."""
    torch.set_num_threads(1)
    return torch.load(path, mmap=True, weights_only=False)


class Turns:
    """Lets a framework run a round when the driver asks for one, and tells it the seconds.

    The driver writes the number of the round and a file of weights to standard input, as a line of JSON; the answer on
    standard output is the seconds, a file of the averaged weights, the clients' accuracies, and versions. Whatever else
    is printed goes to standard error.

    Args:
        path: where the task is.
        packages: packages whose versions the driver shows.
    """

    def __init__(self, path: str, *packages: str) -> None:
        self.answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.weights = Path(path).with_name(f"{os.getpid()}.pt")
        self.versions = ", ".join(f"{package} {version(package)}" for package in (*packages, "torch"))

    def wait(self) -> tuple[int, str]:
        """Wait until it is this harness's turn, and start the clock; ends the process when no more turns come.

        Returns:
            The round to run, counted from 0, and the file of the weights to start from. A framework knows both.
        """
        line = sys.stdin.readline()
        if not line:
            raise SystemExit
        self.start = time.perf_counter()
        round, weights = json.loads(line)
        return round, weights

    def answer(self, weights: Mapping[str, Tensor], accuracies: Sequence[float]) -> None:
        """Stop the clock and tell the driver.

        Args:
            weights: the averaged weights, named as in ``Task.model``.
            accuracies: each client's on ``Task.test``, in the order of the clients; empty if nothing is evaluated.
        """
        seconds = time.perf_counter() - self.start
        torch.save(dict(weights), self.weights)
        print(json.dumps([seconds, str(self.weights), list(accuracies), self.versions]), file=self.answers, flush=True)
