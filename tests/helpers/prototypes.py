"""Clients that lack a class each, for algorithms that exchange per-class means."""

import torch
from torch import Generator

from fedmoe_pl import Federation
from helpers import TensorData, phase
from helpers.runs import federation

SIZES = (13, 8, 11)
OWN_CLASSES = ([1, 2], [0, 2], [0, 1])  # of each client


def without_a_class(sizes=SIZES, **kwargs) -> TensorData:
    """Points of three classes in five dimensions; client i has none of class i, and more of one class than another."""
    generator = Generator().manual_seed(5)
    y = torch.cat([torch.tensor(OWN_CLASSES[i % 3])[torch.arange(n) % 3 % 2] for i, n in enumerate(sizes)])
    centers = torch.randn(3, 5, generator=generator)
    x = centers[y] + torch.randn(sum(sizes), 5, generator=generator)
    y_test = torch.arange(30) % 3
    x_test = centers[y_test] + torch.randn(30, 5, generator=generator)
    parts = torch.arange(sum(sizes)).split(list(sizes))
    data = TensorData(x, y, parts, (x_test, y_test), torch.float64, **{"batch_size": 4, **kwargs})
    data.setup()
    return data


def federate(algorithm, path, rounds=3, **kwargs) -> Federation:
    """A federation of two of the clients per round, with checkpoints, that has not begun."""
    phases = [phase("it", algorithm, rounds=rounds, clients_per_round=2)]
    return federation(path, phases, trainer={"max_epochs": 2, "accelerator": "cpu"}, **kwargs)


def personalized(algorithm, make_model, path, rounds=2) -> tuple[Federation, Federation]:
    """A finished federation, and two newcomers who trained ``rounds`` local rounds from its checkpoint."""
    first = federate(algorithm, path / "first")
    first.fit(make_model(), without_a_class())
    later = federate(algorithm, path / "later")
    data = without_a_class((9, 6))
    data.x = data.x + 0.1  # none of the federation's samples
    later.personalize(make_model(), data, str(first.run_dir / "checkpoints/last.ckpt"), rounds)
    return first, later
