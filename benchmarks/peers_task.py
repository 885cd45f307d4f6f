"""What ``peers.py`` has everybody do, as a file that every environment can read."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from peers_harness import Task
from plain import Work
from torch import nn
from workload import RandomImages, make_model

from fedmoe_pl.seeds import derive_seed


def write_task(task: Path, start: Path, rounds: int, options: argparse.Namespace) -> None:
    """Write what all have to do, and the weights to start from.

    Args:
        task: file of the task.
        start: file of the weights.
        rounds: number of rounds that there are seeds for.
        options: the options of ``peers.py``.
    """
    data = RandomImages(options.clients, options.samples, options.batch_size, max(options.evaluate, 1))
    data.setup()
    expert = make_model(gate_weight=1).global_expert
    # Taken apart, as the peers' environments have torch but not fedmoe_pl.
    model = nn.Sequential(expert.get_submodule("extractor"), expert.get_submodule("classifier"))
    # The federation's seeds of these clients.
    seeds = [[derive_seed(0, 3, client, round) for client in range(options.clients)] for round in range(rounds)]
    work = Work(data.x, data.y, list(data.train_samples), options.batch_size, options.epochs)
    test = (data.x[data.global_test], data.y[data.global_test]) if options.evaluate else None
    torch.save(Task(work, model, seeds, options.workers, test), task)
    torch.save(model.state_dict(), start)
