"""The bare PyTorch loop as a harness of ``peers.py``: one process, one thread."""

from __future__ import annotations

import sys

import torch
from peers_harness import Turns, load_task
from plain import accuracy, bare_round
from torch import nn


def main(path: str) -> None:
    """Run the rounds that are asked for, each from the weights that are asked for."""
    turns = Turns(path)
    task = load_task(path)
    while True:
        accuracies = []

        def evaluate(model: nn.Module, accuracies: list[float] = accuracies) -> None:
            if task.test:
                accuracies.append(accuracy(model, *task.test))

        round, start = turns.wait()
        task.model.load_state_dict(torch.load(start))
        weights = bare_round(task.model, task.work, task.seeds[round], evaluate)
        turns.answer(weights, accuracies)


if __name__ == "__main__":
    main(sys.argv[1])
