"""The handwritten digits that come with scikit-learn."""

from __future__ import annotations

from typing import Any

import torch

from fedmoe_pl.checks import check_at_least
from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.datamodule import FederatedDataModule
from fedmoe_pl.data.datasets.images import resize


class Digits(FederatedDataModule):
    """The 1,797 handwritten digits, 8 x 8 pixels, that come with scikit-learn; needs no download.

    Pixels are divided by 16. Every fifth sample of a class is in the global test set; the others are for training.

    Args:
        image_size: height and width that the images are resized to; None for 8.
        **kwargs: arguments of ``FederatedDataModule``.
    """

    def __init__(self, image_size: int | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        check_at_least(self, "image_size", image_size, 1)
        self.image_size = image_size

    def load(self) -> Arrays:
        """Reads the images and splits them into training and test."""
        from sklearn.datasets import load_digits  # only this data set needs scikit-learn

        pixels, labels = load_digits(return_X_y=True)  # pixels: (1797, 64), from 0 to 16
        x = resize(self, torch.from_numpy(pixels).float().view(-1, 1, 8, 8) / 16, self.image_size)
        y = torch.from_numpy(labels)
        rank_in_class = torch.nn.functional.one_hot(y).cumsum(0).gather(1, y[:, None])[:, 0]
        test = rank_in_class % 5 == 0
        return Arrays(x[~test], y[~test], x[test], y[test])
