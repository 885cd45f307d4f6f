"""Clients whose images are rotated, group by group (METHODS 5.8)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fedmoe_pl.data.arrays import Arrays


def rotated(arrays: Arrays, rotations: Sequence[int], num_clients: int | None, rng: np.random.Generator) -> Arrays:
    """Copy all images once per rotation, and share out each rotation among a group of clients of its own.

    The clients are cut into groups of equal size, up to one, in the order of their numbers and of ``rotations``. Within
    a group all training images are dealt at random in equal parts, and all test images likewise, so that a client's own
    test samples are of its rotation. An image is thus held once in each group. Every rotation of all test images makes
    up the global test set (Ghosh et al. 2020; Isaksson et al. 2022).

    Args:
        arrays: images of shape (n, channels, height, width), without client ids.
        rotations: angles, counterclockwise, in degrees: multiples of 90.
        num_clients: number of clients.
        rng: source of randomness.

    Returns:
        Images with client ids from 0, those of the first rotation first; memory is needed for all the copies.

    Raises:
        MisconfigurationException: for data without square images or with clients of their own, and for too few clients.
    """
    _check(arrays, rotations, num_clients)
    assert num_clients is not None
    groups = np.array_split(np.arange(num_clients), len(rotations))
    made = {"train": arrays.x_train, "test": arrays.x_test}
    for part, x in made.items():
        if len(x) < len(groups[0]):
            raise MisconfigurationException(
                f"data.init_args.num_clients is {num_clients}, but {len(groups[0])} of them would share the {len(x)} "
                f"{part} images of one rotation; at most {len(x) * len(rotations)} clients are possible."
            )
    clients = {part: np.concatenate([_deal(len(x), group, rng) for group in groups]) for part, x in made.items()}
    return replace(
        arrays,
        x_train=_copies(arrays.x_train, rotations),
        y_train=arrays.y_train.repeat(len(rotations)),
        x_test=_copies(arrays.x_test, rotations),
        y_test=arrays.y_test.repeat(len(rotations)),
        client_train=clients["train"],
        client_test=clients["test"],
    )


def check_rotations(rotations: Sequence[int] | None) -> list[int] | None:
    """Return ``rotations`` as a list, or refuse them.

    Raises:
        MisconfigurationException: if there are none, two are the same or one is no multiple of 90 from 0 to 270.
    """
    if rotations is None:
        return None
    chosen = list(rotations)
    if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= {0, 90, 180, 270}:
        raise MisconfigurationException(
            f"data.init_args.rotations is {chosen}, but must be null or different angles among 0, 90, 180 and 270."
        )
    return chosen


def _check(arrays: Arrays, rotations: Sequence[int], num_clients: int | None) -> None:
    if num_clients is None or num_clients < len(rotations):
        raise MisconfigurationException(
            f"data.init_args.num_clients is {num_clients}, but data.init_args.rotations {list(rotations)} need "
            f"at least one client each, {len(rotations)} in all."
        )
    if arrays.client_train is not None:
        raise MisconfigurationException(
            f"data.init_args.rotations is {list(rotations)}, but must be null for data that say which client a sample "
            "comes from."
        )
    shape = tuple(arrays.x_train.shape)
    if len(shape) != 4 or (shape[2] != shape[3] and any(angle % 180 for angle in rotations)):
        raise MisconfigurationException(
            f"data.init_args.rotations is {list(rotations)}, but samples of shape {shape[1:]} cannot be rotated like "
            "this: images have shape (channels, height, width), and for 90 and 270 degrees they must be square."
        )


def _copies(x: Tensor, rotations: Sequence[int]) -> Tensor:
    return torch.cat([x.rot90(angle // 90, dims=(2, 3)) for angle in rotations])


def _deal(n: int, group: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return the client of each of n samples: equal parts at random."""
    return rng.permutation(np.resize(group, n))
