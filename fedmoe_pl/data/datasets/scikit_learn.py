"""The data that come with scikit-learn."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

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


class Diabetes(FederatedDataModule):
    """The 442 diabetes patients that come with scikit-learn, a regression; needs no download.

    A sample has ten measurements, and the target is the progression of the disease after a year; each is scaled by its
    mean and standard deviation over the training samples. Every fifth sample is in the global test set. The decade of
    the patient's age is the client of a sample, up to 29 and from 70 on together, so that there are six clients; with
    the partitioner ``IID`` there may be others.
    """

    def load(self) -> Arrays:
        """Reads the patients and splits them into training and test."""
        from sklearn.datasets import load_diabetes  # only this data set needs scikit-learn

        measured, progression = map(np.asarray, load_diabetes(return_X_y=True, scaled=False))  # (442, 10), (442,)
        decades = np.clip(measured[:, 0] // 10, 2, 7).astype(int)
        x, y = torch.from_numpy(measured), torch.from_numpy(progression)
        test = torch.arange(len(y)) % 5 == 4
        x, y = ((values - values[~test].mean(0)) / values[~test].std(0) for values in (x, y))
        samples = (x[~test].float(), y[~test].float(), x[test].float(), y[test].float())
        return Arrays(*samples, decades[~test.numpy()], decades[test.numpy()])
