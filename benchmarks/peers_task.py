"""What ``peers.py`` has everybody do, as a file that every environment can read."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import yaml
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


def write_configuration(path: Path, task: Path, rounds: int, options: argparse.Namespace) -> None:
    """Write fedmoe_pl's configuration of the task, without its backend.

    Args:
        path: the file.
        task: file of the task.
        rounds: as of :func:`write_task`.
        options: the options of ``peers.py``.
    """
    data = {
        "num_clients": options.clients,
        "samples_per_client": options.samples,
        "batch_size": options.batch_size,
        "num_test": max(options.evaluate, 1),
    }
    phase = {
        "name": "FedAvg",
        "algorithm": {"class_path": "FedAvg", "init_args": {"shared": "global_expert.*"}},
        "rounds": rounds,
        "evaluate": {"after": "local_training"} if options.evaluate else False,
    }
    configuration = {
        "model": {"class_path": "workload.make_model", "init_args": {"gate_weight": 1}},
        "data": {"class_path": "workload.RandomImages", "init_args": data},
        "trainer": {
            "max_epochs": options.epochs,
            "accelerator": "cpu",
            "devices": options.workers,
        },
        "federation": {
            "phases": [phase],
            "callbacks": [{"class_path": "peers_fedmoe.Held", "init_args": {"task": str(task)}}],
            "logger": False,
            "default_root_dir": str(path.parent),
            "enable_checkpointing": False,
            "enable_progress_bar": False,
        },
    }
    path.write_text(yaml.safe_dump(configuration))
