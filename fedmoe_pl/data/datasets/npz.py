"""A user's own arrays in a file."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fedmoe_pl.checks import check_at_least
from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.datamodule import FederatedDataModule
from fedmoe_pl.data.datasets.images import READ_ERRORS, channels_first, resize


class NpzFile(FederatedDataModule):
    """A user's own arrays in one .npz file.

    The file holds ``x_train``, ``y_train``, ``x_test`` and ``y_test``, and may hold ``client_train`` and
    ``client_test``, the id of the client that each sample comes from. Images are uint8, of shape (n, height, width),
    (n, height, width, channels) or (n, channels, height, width) with 1 or 3 channels; they are divided by 255 and
    normalized. Floating-point arrays of any shape (n, ...) are not changed, nor are integers of shape (n, length),
    which are ids of words from 0. Labels are integers of shape (n,), from 0; floating-point targets of any shape
    (n, ...), such as those of a regression, and integers of shape (n, k, ...), such as masks, are no classes.

    Args:
        path: the file.
        image_size: height and width that images are resized to; None to keep their size.
        mean: mean of each channel of the images in [0, 1]; None to compute it from the training images.
        std: standard deviation of each channel; None to compute it.
        **kwargs: arguments of ``FederatedDataModule``.
    """

    def __init__(
        self,
        path: str,
        image_size: int | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.path = path
        check_at_least(self, "image_size", image_size, 1)
        self.image_size = image_size
        self.mean = mean
        self.std = std

    def load(self) -> Arrays:
        """Reads the file."""
        name = f"NpzFile: path is '{self.path}'"
        arrays = _read_npz(self.path, name)
        return Arrays(
            y_train=_to_targets(arrays["y_train"], f"{name}: y_train"),
            y_test=_to_targets(arrays["y_test"], f"{name}: y_test"),
            x_train=resize(_to_samples(arrays["x_train"], f"{name}: x_train"), self.image_size),
            x_test=resize(_to_samples(arrays["x_test"], f"{name}: x_test"), self.image_size),
            client_train=arrays.get("client_train"),
            client_test=arrays.get("client_test"),
            mean=self.mean,
            std=self.std,
            name=name,
        )


def _read_npz(path: str, name: str) -> dict[str, np.ndarray]:
    """Returns the arrays of a data set, and the client ids if the file has them."""
    if not os.path.isfile(path):
        raise MisconfigurationException(f"{name}, but there is no such file ('{os.path.abspath(path)}').")
    needed, optional = ("x_train", "y_train", "x_test", "y_test"), ("client_train", "client_test")
    try:
        with open(path, "rb") as opened, np.load(opened) as file:
            missing = [key for key in needed if key not in file]
            arrays = {key: file[key] for key in (*needed, *optional) if key in file}
    except (*READ_ERRORS, TypeError, AttributeError) as error:  # the last two for a file of another type
        raise MisconfigurationException(
            f"{name}, but the file is damaged or not an .npz file of plain arrays ({error or type(error).__name__})."
        ) from error
    if missing:
        raise MisconfigurationException(
            f"{name}, but the file lacks {', '.join(missing)}; it must hold {', '.join(needed)}, and may hold "
            f"{' and '.join(optional)}."
        )
    return arrays


def _to_targets(array: np.ndarray, name: str) -> Tensor:
    """Returns an array of targets as a tensor: float32, or int64 for integers."""
    if array.dtype.kind not in "iubf":
        raise MisconfigurationException(
            f"{name} is {array.dtype}, but targets must be integers from 0, or floating point."
        )
    with np.errstate(over="ignore"):  # what becomes infinite is refused
        return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))


def _to_samples(array: np.ndarray, name: str) -> Tensor:
    """Returns an array of samples as a tensor: images as uint8, other samples as float32 or int64."""
    if array.dtype == np.uint8:
        return channels_first(array, name)
    if array.dtype.kind == "f" and array.ndim > 0:
        with np.errstate(over="ignore"):  # what becomes infinite is refused
            return torch.from_numpy(array.astype(np.float32))
    if array.dtype.kind in "iu" and array.ndim == 2:
        return torch.from_numpy(array.astype(np.int64))
    raise MisconfigurationException(
        f"{name} is {array.dtype} of shape {array.shape}, but must be uint8 images, floating point, or integer ids of "
        "words of shape (n, length)."
    )
