"""Arrays and data modules that tests of the data set up."""

from typing import TypeVar

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import Arrays, FederatedDataModule, Partitioner
from helpers import TensorData


class Own(FederatedDataModule):
    """A user's own data module of given arrays."""

    def __init__(self, arrays: Arrays, **kwargs):
        super().__init__(**kwargs)
        self.arrays = arrays

    def load(self) -> Arrays:
        return self.arrays


Data = TypeVar("Data", bound=FederatedDataModule)


def set_up(datamodule: Data) -> Data:
    datamodule.prepare_data()
    datamodule.setup()
    return datamodule


def client_samples(data: FederatedDataModule, client: int) -> torch.Tensor:
    """Indices of a client's samples in the order of the data, whichever part they are in."""
    return torch.cat([data.train_samples[client], data.test_samples[client]]).sort().values


def refusal_of(make) -> InvalidArgumentError:
    """The refusal, in one line, of what ``make`` does or of the data that it makes when they are set up."""
    with pytest.raises(MisconfigurationException) as error:
        made = make()
        if isinstance(made, FederatedDataModule):
            made.setup()
    assert "\n" not in str(error.value) and len(str(error.value)) < 1000
    refusal = error.value if isinstance(error.value, InvalidArgumentError) else error.value.__cause__  # of a phase
    assert isinstance(refusal, InvalidArgumentError), str(error.value)
    return refusal


def refused_argument(make) -> str:
    """The argument that is refused."""
    return refusal_of(make).argument


def without_labels(data: TensorData, share: float, **kwargs) -> TensorData:
    """The data without the labels of a share of their training samples, but with that of each client's first one."""
    arrays, parts = data.arrays, data.partitioner.parts
    lacks = torch.rand(len(arrays.y_train), generator=torch.Generator().manual_seed(1)) < share
    lacks[[int(part[0]) for part in parts]] = False
    y, test = arrays.y_train.masked_fill(lacks, -100), (arrays.x_test, arrays.y_test)
    return set_up(TensorData(arrays.x_train, y, parts, test, data.dtype, batch_size=data.batch_size, **kwargs))


def vectors(n: int, num_classes: int = 3, n_test: int = 4, **kwargs) -> Arrays:
    """Sample i is the number i, and classes are in turn."""
    y = [index % num_classes for index in range(n + n_test)]
    return numbered(y[:n], y[n:], **kwargs)


def numbered(y_train, y_test=(0, 1), **kwargs) -> Arrays:
    """Sample i is the number i."""
    y = torch.tensor([*y_train, *y_test])
    x, n = torch.arange(float(len(y)))[:, None], len(y_train)
    return Arrays(x[:n], y[:n], x[n:], y[n:], **kwargs)


def random_images(n=40, n_test=12, size=3) -> Arrays:
    """Random images of two channels, no two alike and none the same when rotated."""
    x = torch.rand(n + n_test, 2, size, size, generator=torch.Generator().manual_seed(0))
    y = torch.arange(n + n_test) % 5
    return Arrays(x[:n], y[:n], x[n:], y[n:])


def counts(data: FederatedDataModule, parts) -> list[list[int]]:
    return [torch.bincount(data.y[part], minlength=data.num_classes).tolist() for part in parts]


def dealt(partitioner: Partitioner, labels: np.ndarray, num_clients: int | None, seed=0) -> np.ndarray:
    """Samples of each class that each client holds, (num_clients, num_classes); none may be held twice."""
    parts = partitioner(labels, num_clients, np.random.default_rng(seed))
    held = np.concatenate(parts)
    assert len(np.unique(held)) == len(held)
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


CIFAR10_LABELS = np.arange(50_000) % 10


rng = np.random.default_rng(0)


def pixels(*shape):
    return rng.integers(0, 256, shape, dtype=np.uint8)
