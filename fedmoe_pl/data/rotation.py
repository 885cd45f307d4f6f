"""Groups of clients whose images are rotated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.partitioners.natural_ids import NaturalIds
from fedmoe_pl.data.partitioners.partitioner import Partitioner


def rotated(arrays: Arrays, rotations: Sequence[int], num_clients: int | None, rng: np.random.Generator) -> Arrays:
    """Copies all images once per rotation and deals each copy to a group of clients.

    The groups are consecutive clients, in the order of ``rotations``, and differ in size by at most one. In each group,
    all training images are dealt at random in equal parts, and so are all test images. Each group therefore holds each
    image once, and a client's local test samples have its rotation. The global test set holds all test images in every
    rotation (Ghosh et al. 2020; Isaksson et al. 2022).

    Args:
        arrays: images of shape (n, channels, height, width), without client ids.
        rotations: angles, counterclockwise, in degrees: multiples of 90.
        num_clients: number of clients.
        rng: source of randomness.

    Returns:
        Images with client ids from 0, those of the first rotation first; all copies are in memory.

    Raises:
        MisconfigurationException: if the samples cannot be rotated, the data have client ids, or there are too few or
            too many clients.
    """
    _check(arrays, rotations, num_clients)
    assert num_clients is not None
    groups = np.array_split(np.arange(num_clients), len(rotations))
    images = {"train": arrays.x_train, "test": arrays.x_test}
    for part, x in images.items():
        if len(x) < len(groups[0]):
            raise MisconfigurationException(
                f"num_clients is {num_clients}, but {len(groups[0])} of them would share the {len(x)} {part} images of "
                f"one rotation; at most {len(x) * len(rotations)} clients are possible."
            )
    clients = {part: np.concatenate([_deal(len(x), group, rng) for group in groups]) for part, x in images.items()}
    return replace(
        arrays,
        x_train=_copies(arrays.x_train, rotations),
        y_train=arrays.y_train.repeat(len(rotations)),
        x_test=_copies(arrays.x_test, rotations),
        y_test=arrays.y_test.repeat(len(rotations)),
        client_train=clients["train"],
        client_test=clients["test"],
    )


def check_rotations(
    owner: object, rotations: Sequence[int] | None, partitioner: Partitioner | None
) -> list[int] | None:
    """Checks ``rotations`` and returns them as a list.

    Args:
        owner: the data module; the message names its class.
        rotations: angles in degrees; None for no rotations.
        partitioner: the data module's partitioner.

    Raises:
        MisconfigurationException: if the list is empty, has an angle twice, or one other than 0, 90, 180 and 270, or
            there is a partitioner, too.
    """
    if rotations is None:
        return None
    if not isinstance(partitioner, NaturalIds | None):
        raise MisconfigurationException(
            f"{type(owner).__name__}: partitioner is {type(partitioner).__name__}, but must be None with rotations, "
            "which decide which client holds which images."
        )
    chosen = list(rotations)
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= {0, 90, 180, 270}:
        raise MisconfigurationException(
            f"rotations is {chosen}, but must be None or different angles among 0, 90, 180 and 270."
        )
    return chosen


def _check(arrays: Arrays, rotations: Sequence[int], num_clients: int | None) -> None:
    if num_clients is None or num_clients < len(rotations):
        raise MisconfigurationException(
            f"num_clients is {num_clients}, but must be at least {len(rotations)}, one for each of the rotations "
            f"{list(rotations)}."
        )
    if arrays.client_train is not None:
        raise MisconfigurationException(f"rotations is {list(rotations)}, but must be None for data with client ids.")
    shape = tuple(arrays.x_train.shape)
    if len(shape) != 4 or (shape[2] != shape[3] and any(angle % 180 for angle in rotations)):
        raise MisconfigurationException(
            f"rotations is {list(rotations)}, but samples of shape {shape[1:]} cannot be rotated by them: images have "
            "shape (channels, height, width), and for 90 and 270 degrees they must be square."
        )


def _copies(x: Tensor, rotations: Sequence[int]) -> Tensor:
    return torch.cat([x.rot90(angle // 90, dims=(2, 3)) for angle in rotations])


def _deal(n: int, group: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Returns the client of each of n samples, in equal parts at random."""
    return rng.permutation(np.resize(group, n))
