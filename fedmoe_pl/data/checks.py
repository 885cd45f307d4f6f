"""Checks of arguments of data modules, partitioners and augmentations."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fedmoe_pl.data.map_style import MapStyleData


def check_fractions(
    owner: object, test_fraction: float, validation_fraction: float, pool: bool, stratify: bool
) -> None:
    """Refuses shares of held-out samples that leave none for training, or no global test set, or nothing to stratify.

    Args:
        owner: the data module; the message names its class.
        test_fraction: share of each client's samples that is its local test set.
        validation_fraction: share that is for validation.
        pool: whether the global test set is what clients hold out.
        stratify: whether each class is split separately.

    Raises:
        MisconfigurationException: if a share is outside [0, 1), both together reach 1, ``pool`` needs test samples, or
            ``stratify`` has nothing to split.
    """
    name = type(owner).__name__
    for argument, fraction in (("test_fraction", test_fraction), ("validation_fraction", validation_fraction)):
        if not 0 <= fraction < 1:
            raise MisconfigurationException(f"{name}: {argument} is {fraction}, but must be in [0, 1).")
    if test_fraction + validation_fraction >= 1:
        raise MisconfigurationException(
            f"{name}: test_fraction is {test_fraction} and validation_fraction is {validation_fraction}, but they "
            "must add up to less than 1, so that samples remain for training."
        )
    if pool and test_fraction == 0:
        raise MisconfigurationException(
            f"{name}: test_fraction is {test_fraction}, but must be above 0 if pool is true, because the global "
            "test set is what the clients hold out."
        )
    if stratify and test_fraction == validation_fraction == 0:
        raise MisconfigurationException(
            f"{name}: stratify is True, but must be False if test_fraction and validation_fraction are 0, because "
            "nothing is held out."
        )


def check_augmentation(owner: object, augmentation: Sequence[object], x: Tensor) -> None:
    """Refuses to augment samples that are not images.

    Args:
        owner: the data module; the message names its class.
        augmentation: the augmentations.
        x: the samples, shape (n, ...).

    Raises:
        MisconfigurationException: if there are augmentations and the samples are not images.
    """
    if augmentation and x.dim() != 4:
        raise MisconfigurationException(
            f"{type(owner).__name__}: augmentation must be left out for samples of shape {tuple(x.shape)}; it needs "
            "images of shape (n, channels, height, width)."
        )


def check_not_in_memory(
    owner: object, data: MapStyleData, augmentation: Sequence[object], rotations: Sequence[int] | None
) -> None:
    """Refuses what changes tensors in memory, for samples that are read one by one.

    Args:
        owner: the data module; the message names its class.
        data: the data set.
        augmentation: the augmentations.
        rotations: angles of groups of clients; None for none.

    Raises:
        MisconfigurationException: if there are augmentations or rotations.
    """
    given = {"augmentation": bool(augmentation), "rotations": rotations is not None}
    for argument in (name for name, is_given in given.items() if is_given):
        raise MisconfigurationException(
            f"{type(owner).__name__}: {argument} must be left out for samples that are read one by one from a "
            f"{type(data.train_dataset).__name__}, because it changes tensors in memory; the dataset's own transform "
            "can do it."
        )
