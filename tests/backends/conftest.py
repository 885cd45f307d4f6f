"""Data that several test modules share."""

import pytest
import torch
from helpers import TensorData


@pytest.fixture
def images():
    def make(augmentation):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(12, 1, 32, 32, generator=generator)
        y = torch.randint(10, (12,), generator=generator)
        parts = torch.arange(12).split([7, 5])
        data = TensorData(x, y, parts, dtype=torch.float64, batch_size=3, augmentation=augmentation)
        data.setup()
        return data

    return make
