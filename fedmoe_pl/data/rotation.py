"""Groups of clients whose images are rotated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.partitioners.given import NaturalIds
from fedmoe_pl.data.partitioners.partitioner import Partitioner


def rotated(
    owner: object, arrays: Arrays, rotations: Sequence[int], num_clients: int | None, rng: np.random.Generator
) -> Arrays:
    """Copies all images once per rotation and deals each copy to a group of clients.

    The groups are consecutive clients, in the order of ``rotations``, and differ in size by at most one. In each group,
    all training images are dealt at random in equal parts, and so are all test images. Each group therefore holds each
    image once, and a client's local test samples have its rotation. The global test set holds all test images in every
    rotation (Ghosh et al. 2020; Isaksson et al. 2022). All copies are in memory.
    """
    _check(owner, arrays, rotations, num_clients)
    assert num_clients is not None
    groups = np.array_split(np.arange(num_clients), len(rotations))
    client_train, client_test = (
        np.concatenate([rng.permutation(np.resize(group, n)) for group in groups]) for n in arrays.sizes
    )
    return replace(
        arrays,
        x_train=_copies(arrays.x_train, rotations),
        y_train=torch.cat([arrays.y_train] * len(rotations)),
        x_test=_copies(arrays.x_test, rotations),
        y_test=torch.cat([arrays.y_test] * len(rotations)),
        client_train=client_train,
        client_test=client_test,
    )


def check_rotations(
    owner: object, rotations: Sequence[int] | None, partitioner: Partitioner | None, pool: bool
) -> None:
    """Refuses angles twice, or other than 0, 90, 180 and 270, and what would mix the groups or training and test."""
    if rotations is None:
        return
    if not isinstance(partitioner, NaturalIds | None):
        raise InvalidArgumentError(owner, "partitioner", partitioner, "None", "rotations decide who holds what")
    if not rotations or len({*rotations}) < len(rotations) or not {*rotations} <= {0, 90, 180, 270}:
        raise InvalidArgumentError(owner, "rotations", rotations, "different angles among 0, 90, 180 and 270")
    if pool:
        because = "pool is True, and other clients would train on the held-out images in another rotation"
        raise InvalidArgumentError(owner, "rotations", rotations, "None", because)


def _check(owner: object, arrays: Arrays, rotations: Sequence[int], num_clients: int | None) -> None:
    height_and_width = arrays.x_train.shape[2:]
    if len(height_and_width) != 2:
        raise InvalidArgumentError(owner, "rotations", rotations, "None for samples that are not images")
    if len({*height_and_width}) > 1 and {*rotations} & {90, 270}:
        because = "{0} x {1} pixels become {1} x {0}".format(*height_and_width)
        raise InvalidArgumentError(owner, "rotations", rotations, "0 and 180 for images that are not square", because)
    least, most = len(rotations), len(rotations) * min(arrays.sizes)
    if num_clients is None or not least <= num_clients <= most:
        allowed = f"from {least}, one for each rotation, to {most}, the number of images"
        raise InvalidArgumentError(owner, "num_clients", num_clients, allowed)
    if arrays.client_train is not None:
        raise InvalidArgumentError(owner, "rotations", rotations, "None", "the data have client ids")


def _copies(x: Tensor, rotations: Sequence[int]) -> Tensor:
    return torch.cat([x.rot90(angle // 90, dims=(2, 3)) for angle in rotations])
