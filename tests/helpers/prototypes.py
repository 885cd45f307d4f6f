"""Clients that lack a class each, for algorithms that exchange per-class means."""

import torch
from torch import Generator

from helpers import TensorData

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
