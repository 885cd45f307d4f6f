"""Data sets that come with torchvision."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, Literal

import torch
from torchvision import datasets

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.datasets.images import ImageDataModule, channels_first, resize

EMNISTSplit = Literal["byclass", "bymerge", "balanced", "letters", "digits", "mnist"]


class TorchvisionDataModule(ImageDataModule):
    """The base of torchvision's data sets, which are read into memory as a whole; derive from it and write ``read``.

    Args:
        root: folder with the files; missing ones are downloaded into it.
        download: whether ``prepare_data`` downloads missing files.
        **kwargs: arguments of ``ImageDataModule``.
    """

    def __init__(self, root: str = "data", download: bool = True, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root
        self.download = download

    @abstractmethod
    def read(self, train: bool, download: bool) -> tuple[Any, Any]:
        """Reads one part of torchvision's data set.

        Args:
            train: whether to read the training part or the test part.
            download: whether to download missing files first.

        Returns:
            Images, uint8, with channels first, last or not at all, and their classes.
        """

    def prepare_data(self) -> None:
        """Downloads missing files."""
        if self.download:
            for train in (True, False):
                self._read(train, download=True)

    def load(self) -> Arrays:
        """Reads the files."""
        parts = []
        for train in (True, False):
            images, labels = self._read(train, download=False)
            x = channels_first(self, "images", images)
            parts += [resize(self, x, self.image_size), torch.as_tensor(labels)]
        return Arrays(*parts, mean=self.mean, std=self.std)

    def _read(self, train: bool, download: bool) -> tuple[Any, Any]:
        try:
            return self.read(train, download)
        except (OSError, RuntimeError) as error:  # no files, or no connection to download them
            allowed = f"a folder with torchvision's files of {type(self).__name__}, or one to download them into"
            raise InvalidArgumentError(self, "root", self.root, allowed, " ".join(str(error).split())) from error


class _InTwoParts(TorchvisionDataModule):
    """Those whose parts torchvision tells apart by ``train``."""

    dataset: Callable[..., Any]

    def read(self, train: bool, download: bool) -> tuple[Any, Any]:
        """Reads one part."""
        data = self.dataset(self.root, train=train, download=download)
        return data.data, data.targets


class MNIST(_InTwoParts):
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, 28 x 28 pixels, 10 classes.

    Args:
        mean: mean of the images in [0, 1].
        std: their standard deviation.
        **kwargs: arguments of ``TorchvisionDataModule``.
    """

    dataset = datasets.MNIST

    def __init__(
        self, mean: tuple[float, ...] | None = (0.1307,), std: tuple[float, ...] | None = (0.3081,), **kwargs: Any
    ) -> None:
        super().__init__(mean=mean, std=std, **kwargs)


class FashionMNIST(MNIST):
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothes, 28 x 28 pixels, 10 classes.

    Its arguments are those of ``MNIST``. It is normalized by default with the same constants, as in PFL-MoE.
    """

    dataset = datasets.FashionMNIST


class EMNIST(TorchvisionDataModule):
    """EMNIST: handwritten letters and digits, 28 x 28 pixels, upright, although torchvision stores them transposed.

    Args:
        split: "byclass" (62 classes), "bymerge" or "balanced" (47), "letters" (26), "digits" or "mnist" (10).
        **kwargs: arguments of ``TorchvisionDataModule``.
    """

    def __init__(self, split: EMNISTSplit = "balanced", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.split = split

    def read(self, train: bool, download: bool) -> tuple[Any, Any]:
        """Reads one part."""
        data = datasets.EMNIST(self.root, split=self.split, train=train, download=download)
        first = 1 if self.split == "letters" else 0  # its classes start at 1
        return data.data.transpose(1, 2), data.targets - first


class CIFAR10(_InTwoParts):
    """CIFAR-10: 50,000 training and 10,000 test images in colour, 32 x 32 pixels, 10 classes.

    It is normalized by default with the constants of PFL-MoE.

    Args:
        mean: mean of each channel of the images in [0, 1].
        std: standard deviation of each channel.
        **kwargs: arguments of ``TorchvisionDataModule``.
    """

    dataset = datasets.CIFAR10

    def __init__(
        self,
        mean: tuple[float, ...] | None = (0.4914, 0.4822, 0.4465),
        std: tuple[float, ...] | None = (0.2023, 0.1994, 0.2010),
        **kwargs: Any,
    ) -> None:
        super().__init__(mean=mean, std=std, **kwargs)


class CIFAR100(_InTwoParts):
    """CIFAR-100: 50,000 training and 10,000 test images in colour, 32 x 32 pixels, 100 classes."""

    dataset = datasets.CIFAR100


class SVHN(TorchvisionDataModule):
    """SVHN: 73,257 training and 26,032 test images of house numbers, 32 x 32 pixels, 10 classes; needs scipy."""

    def read(self, train: bool, download: bool) -> tuple[Any, Any]:
        """Reads one part."""
        data = datasets.SVHN(self.root, split="train" if train else "test", download=download)
        return data.data, data.labels
