"""A user's own images in folders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torchvision import datasets
from torchvision.datasets.folder import default_loader
from torchvision.transforms.v2 import functional

from fedmoe_pl.checks import InvalidArgumentError, check_at_least
from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.datamodule import FederatedDataModule
from fedmoe_pl.data.datasets.images import READ_ERRORS, check_memory, resize
from fedmoe_pl.data.targets import reason_of


class ImageFolder(FederatedDataModule):
    """A user's own images, one folder per class, such as ``train/cat/1.png`` and ``test/cat/2.png``.

    Images are read as RGB. Classes are numbered by the sorted names of the folders in ``train_dir``.

    Args:
        train_dir: folder of the training images.
        test_dir: folder of the images of the global test set; its classes must be among those of ``train_dir``.
        image_size: length to which the shorter side of every image is resized, before its square centre is cut out;
            None for images that all have the same size.
        mean: mean of each channel of the images in [0, 1]; None to compute it from the training images.
        std: standard deviation of each channel; None to compute it.
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
        check_at_least(self, "image_size", image_size, 1)
        self.image_size = image_size
        self.mean = mean
        self.std = std

    def load(self) -> Arrays:
        """Reads all images."""
        train = _open_folder(self.train_dir, "train_dir")
        test = _open_folder(self.test_dir, "test_dir")
        if unknown := sorted(set(test.classes) - set(train.classes)):
            reason = f"train_dir has no class {unknown[0]}"
            raise InvalidArgumentError(self, "test_dir", self.test_dir, "a folder of the same classes", reason)
        # by name, because a test folder without some of the classes numbers the others differently
        y_test = [train.class_to_idx[test.classes[target]] for target in test.targets]
        return Arrays(
            _read_images(train, self.image_size, "train_dir"),
            torch.tensor(train.targets),
            _read_images(test, self.image_size, "test_dir"),
            torch.tensor(y_test),
            mean=self.mean,
            std=self.std,
        )


def _open_folder(folder: str, argument: str) -> datasets.ImageFolder:
    try:
        return datasets.ImageFolder(folder)
    except OSError as error:
        allowed = "a folder with one folder of images per class"
        raise InvalidArgumentError("ImageFolder", argument, folder, allowed, reason_of(error)) from error


def _read_images(folder: datasets.ImageFolder, image_size: int | None, argument: str) -> Tensor:
    images: list[Tensor] = []
    for path, _ in folder.samples:
        try:
            image = functional.pil_to_tensor(default_loader(path))
        except READ_ERRORS as error:
            reason = f"'{path}' cannot be read ({error})"
            raise InvalidArgumentError("ImageFolder", argument, folder.root, "a folder of images", reason) from error
        if image_size is not None and not images:
            check_memory("ImageFolder", image_size, len(folder.samples), len(image) * image.element_size())
        images.append(resize("ImageFolder", image.unsqueeze(0), image_size)[0])
        if image.shape != images[0].shape and image_size is None:
            reason = f"the images have different sizes, such as '{path}' and '{folder.samples[0][0]}'"
            raise InvalidArgumentError("ImageFolder", "image_size", None, "given", reason)
    return torch.stack(images)
