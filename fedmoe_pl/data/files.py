"""Data sets of a user's own: arrays in a file, images in folders."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.folder import default_loader
from torchvision.transforms.v2 import functional

from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.datamodule import FederatedDataModule
from fedmoe_pl.data.images import READ_ERRORS, channels_first, checked_image_size, resize


class NpzFile(FederatedDataModule):
    """A user's own arrays in one .npz file.

    The file holds ``x_train``, ``y_train``, ``x_test`` and ``y_test``, and may hold ``client_train`` and
    ``client_test``, the id of the client that each sample comes from. Images are uint8, of shape (n, height, width),
    (n, height, width, channels) or (n, channels, height, width) with 1 or 3 channels; they are divided by 255 and
    normalized. Floating-point arrays of any shape (n, ...) are taken as they are, and so are integers of shape
    (n, length), which are ids of words, from 0.

    Args:
        path: the file.
        image_size: height and width that images are resized to; None leaves them as they are.
        mean: mean of each channel of the images in [0, 1]; None to compute it from the training images.
        std: standard deviation of each channel, likewise.
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
        self.image_size = checked_image_size(image_size)
        self.mean = mean
        self.std = std

    def load(self) -> Arrays:
        """Read the file."""
        name = f"data.init_args.path: '{self.path}'"
        arrays = _read_npz(self.path, name)
        labels = {}
        for key in ("y_train", "y_test"):
            if arrays[key].dtype.kind not in "iu":
                raise MisconfigurationException(
                    f"{name}: {key} is {arrays[key].dtype}, but labels must be integers from 0."
                )
            labels[key] = torch.from_numpy(arrays[key].astype(np.int64))
        return Arrays(
            x_train=resize(_to_samples(arrays["x_train"], f"{name}: x_train"), self.image_size),
            x_test=resize(_to_samples(arrays["x_test"], f"{name}: x_test"), self.image_size),
            client_train=arrays.get("client_train"),
            client_test=arrays.get("client_test"),
            mean=self.mean,
            std=self.std,
            name=name,
            **labels,
        )


class ImageFolder(FederatedDataModule):
    """A user's own images, one folder per class, such as ``train/cat/1.png`` and ``test/cat/2.png``.

    Images are read as RGB. Classes are numbered by the sorted names of the folders in ``train_dir``.

    Args:
        train_dir: folder of the training images.
        test_dir: folder of the images of the global test set; its classes must be among those of ``train_dir``.
        image_size: the shorter side of every image is resized to this and its square centre is cut out; None leaves
            the images as they are, which must then all have the same size.
        mean: mean of each channel of the images in [0, 1]; None to compute it from the training images.
        std: standard deviation of each channel, likewise.
        **kwargs: arguments of ``FederatedDataModule``.
    """

    def __init__(
        self,
        train_dir: str,
        test_dir: str,
        image_size: int | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.train_dir = train_dir
        self.test_dir = test_dir
        self.image_size = checked_image_size(image_size)
        self.mean = mean
        self.std = std

    def load(self) -> Arrays:
        """Read all images."""
        train = _open_folder(self.train_dir, "data.init_args.train_dir")
        test = _open_folder(self.test_dir, "data.init_args.test_dir")
        unknown = sorted(set(test.classes) - set(train.classes))
        if unknown:
            raise MisconfigurationException(
                f"data.init_args.test_dir: '{self.test_dir}' has the class '{unknown[0]}', which "
                f"data.init_args.train_dir, '{self.train_dir}', does not have."
            )
        # by name: the test folder may lack a class, and then numbers its classes otherwise
        y_test = [train.class_to_idx[test.classes[target]] for target in test.targets]
        x_train = _read_images([path for path, _ in train.samples], self.image_size, "data.init_args.train_dir")
        x_test = _read_images([path for path, _ in test.samples], self.image_size, "data.init_args.test_dir")
        return Arrays(
            x_train,
            torch.tensor(train.targets),
            x_test,
            torch.tensor(y_test),
            mean=self.mean,
            std=self.std,
        )


def _read_npz(path: str, name: str) -> dict[str, np.ndarray]:
    """Return the arrays of the file that a data set needs, and the client ids if it has them."""
    if not os.path.isfile(path):
        raise MisconfigurationException(f"{name}: there is no such file ('{os.path.abspath(path)}').")
    needed, optional = ("x_train", "y_train", "x_test", "y_test"), ("client_train", "client_test")
    try:
        with open(path, "rb") as opened, np.load(opened) as file:
            missing = [key for key in needed if key not in file]
            arrays = {key: file[key] for key in (*needed, *optional) if key in file}
    except (*READ_ERRORS, TypeError, AttributeError) as error:  # the last two for a file of another type
        raise MisconfigurationException(
            f"{name}: the file is damaged or no .npz file of plain arrays ({error or type(error).__name__})."
        ) from error
    if missing:
        raise MisconfigurationException(
            f"{name}: the file lacks {', '.join(missing)}; it must hold {', '.join(needed)}, and may hold "
            f"{' and '.join(optional)}."
        )
    return arrays


def _to_samples(array: np.ndarray, name: str) -> Tensor:
    if array.dtype == np.uint8:
        return channels_first(array, name)
    if array.dtype.kind == "f" and array.ndim > 0:
        return torch.from_numpy(array.astype(np.float32))
    if array.dtype.kind in "iu" and array.ndim == 2:
        return torch.from_numpy(array.astype(np.int64))
    raise MisconfigurationException(
        f"{name} is {array.dtype} of shape {array.shape}, but must be uint8 images, floating point, or integer ids of "
        "words of shape (n, length)."
    )


def _open_folder(folder: str, key: str) -> datasets.ImageFolder:
    if not os.path.isdir(folder):
        raise MisconfigurationException(f"{key}: there is no such folder ('{os.path.abspath(folder)}').")
    try:
        return datasets.ImageFolder(folder)
    except OSError as error:
        raise MisconfigurationException(
            f"{key}: '{folder}' must hold one folder of images per class ({error})."
        ) from error


def _read_images(paths: list[str], image_size: int | None, key: str) -> Tensor:
    images: list[Tensor] = []
    for path in paths:
        try:
            image = functional.pil_to_tensor(default_loader(path))
        except READ_ERRORS as error:
            raise MisconfigurationException(f"{key}: '{path}' cannot be read as an image ({error}).") from error
        images.append(resize(image.unsqueeze(0), image_size)[0])
        if image.shape != images[0].shape and image_size is None:
            (_, height, width), (_, first_height, first_width) = image.shape, images[0].shape
            raise MisconfigurationException(
                f"data.init_args.image_size must be set: '{path}' has {height} x {width} pixels, but '{paths[0]}' has "
                f"{first_height} x {first_width}."
            )
    return torch.stack(images)
