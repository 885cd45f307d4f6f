"""Small data that are made, for tasks other than one class for each sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Generator

from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.datamodule import FederatedDataModule

_FIFTH = 5  # every fifth sample is in the global test set


class SyntheticMultilabel(FederatedDataModule):
    """Points with several labels, made by scikit-learn's ``make_multilabel_classification``.

    A sample has counts, divided by their standard deviation; its target says of each label whether it is on. Every
    fifth sample is in the global test set.

    Args:
        num_samples: number of samples.
        num_features: counts per sample.
        num_labels: number of labels.
        **kwargs: arguments of ``FederatedDataModule``.
    """

    def __init__(self, num_samples: int = 1000, num_features: int = 20, num_labels: int = 5, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_samples = num_samples
        self.num_features = num_features
        self.num_labels = num_labels

    def load(self) -> Arrays:
        """Makes the samples, the same in every call."""
        from sklearn.datasets import make_multilabel_classification  # only this data set needs scikit-learn

        made = make_multilabel_classification(
            n_samples=self.num_samples, n_features=self.num_features, n_classes=self.num_labels, random_state=0
        )
        counts, labels = np.asarray(made[0]), np.asarray(made[1])
        x, y = torch.from_numpy(counts / counts.std()).float(), torch.from_numpy(labels).float()
        test = torch.arange(len(y)) % _FIFTH == _FIFTH - 1
        return Arrays(x[~test], y[~test], x[test], y[test])


class SyntheticShapes(FederatedDataModule):
    """Images of a disk and a square on a noisy background, for segmentation.

    The target has the class of each pixel: 0 for the background, 1 for the disk, 2 for the square, which is in front.
    Each image belongs to one of ten clients. Those of clients with odd numbers are negatives: the shapes are dark.
    Every fifth image of a client is in the global test set.

    Args:
        images_per_client: number of images of each client.
        image_size: height and width of the images in pixels.
        **kwargs: arguments of ``FederatedDataModule``.
    """

    def __init__(self, images_per_client: int = 30, image_size: int = 16, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.images_per_client = images_per_client
        self.image_size = image_size

    def load(self) -> Arrays:
        """Draws the images, the same in every call."""
        n, size, generator = 10 * self.images_per_client, self.image_size, Generator().manual_seed(0)
        rows, columns = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
        radius = size // 5
        centers = torch.randint(radius, size - radius, (4, n, 1, 1), generator=generator)
        disk = (rows - centers[0]) ** 2 + (columns - centers[1]) ** 2 <= radius**2  # (n, size, size)
        square = torch.maximum((rows - centers[2]).abs(), (columns - centers[3]).abs()) < radius
        masks = torch.where(square, 2, disk.long())
        images = (masks > 0) + 0.2 * torch.randn(n, size, size, generator=generator)
        clients = np.arange(n) % 10
        x = torch.where(torch.from_numpy(clients % 2 == 1)[:, None, None], 1 - images, images).unsqueeze(1)
        test = torch.arange(n) // 10 % _FIFTH == _FIFTH - 1
        is_test = test.numpy()
        return Arrays(x[~test], masks[~test], x[test], masks[test], clients[~is_test], clients[is_test])
