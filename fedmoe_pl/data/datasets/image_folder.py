"""A user's own images in folders."""

from __future__ import annotations

from typing import Any

import torch

from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.datamodule import FederatedDataModule
from fedmoe_pl.data.datasets.images import VisibleImages, read_images


class ImageFolder(FederatedDataModule):
    """A user's own images, one folder per class, such as ``train/cat/1.png`` and ``test/cat/2.png``.

    Images are read as RGB, with 8 bits per channel, also from folders in those of classes; hidden files are left out.
    Classes are numbered by the sorted names of the folders in ``train_dir``.

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
        self.image_size = image_size
        self.mean = mean
        self.std = std

    def load(self) -> Arrays:
        """Reads all images."""
        train = VisibleImages(self, "train_dir", self.train_dir)
        test = VisibleImages(self, "test_dir", self.test_dir)
        self.classes = train.classes
        self.files = [path for path, _ in (*train.samples, *test.samples)]
        # by name, because a test folder without some of the classes numbers the others differently
        y_test = [train.class_to_idx[test.classes[target]] for target in test.targets]
        return Arrays(
            read_images(self, [path for path, _ in train.samples], self.image_size),
            torch.tensor(train.targets),
            read_images(self, [path for path, _ in test.samples], self.image_size),
            torch.tensor(y_test),
            mean=self.mean,
            std=self.std,
        )
