"""A data set as arrays, with their checks and the normalization of images."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_CLASSES = 1000  # a label may be higher only if there are as many samples
_OTHERS = "; values that are no classes, such as those of a regression, must be floating point"


@dataclass
class Arrays:
    """A data set as it was read, before normalization and partition.

    Attributes:
        x_train: training samples: uint8 images, shape (n, channels, height, width), which are normalized; floating
            point of any shape (n, ...); or int64 ids of words, from 0, shape (n, length).
        y_train: their targets: classes, shape (n,), integers from 0, or bool; or others, which are not changed, such
            as numbers, several labels per sample or masks: floating point of shape (n, ...), or any type of shape
            (n, k, ...).
        x_test: samples of the global test set, of the same shape and type as ``x_train``; may be empty only if the
            data module pools all samples.
        y_test: their targets.
        client_train: the client that each training sample comes from, shape (n,), any sortable type; None if unknown.
        client_test: the same for the test samples; those of a client without training samples are in the global test
            set only, with a warning.
        mean: mean of each channel of the images in [0, 1], for normalization; None to compute it from ``x_train``.
        std: standard deviation of each channel; None to compute it.
        name: the data's name in messages.
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    client_train: np.ndarray | None = None
    client_test: np.ndarray | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    name: str = "Arrays"

    @property
    def is_images(self) -> bool:
        """Whether samples are images with pixels from 0 to 255, which are normalized."""
        return self.x_train.dtype == torch.uint8

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of training and test samples."""
        return len(self.x_train), len(self.x_test)

    @property
    def targets(self) -> Tensor:
        """Targets of all samples, the training samples first; classes as int64."""
        if not are_classes(self.y_train):
            return torch.cat((self.y_train, self.y_test)) if len(self.y_test) else self.y_train
        return torch.cat((self.y_train, self.y_test)).long()

    def compute_normalization(self, samples: Tensor | None = None) -> None:
        """Sets mean and standard deviation to those of training images.

        Args:
            samples: indices of the images to use, shape (n,); None for all.
        """
        mean, std = _mean_and_std(self.x_train if samples is None else self.x_train[samples])
        self.mean, self.std = mean.tolist(), std.tolist()

    def check(self, needs_test: bool = True) -> None:
        """Refuses arrays that do not fit together.

        Args:
            needs_test: whether there must be test samples.

        Raises:
            MisconfigurationException: if there is a problem; the message describes the first one.
        """
        for problem in self._problems(needs_test):
            raise MisconfigurationException(f"{self.name}: {problem}.")
        for problem in self._normalization_problems():
            raise MisconfigurationException(f"{problem}.")

    def _problems(self, needs_test: bool) -> Iterator[str]:
        for part in ("train", "test"):
            x, y, ids = getattr(self, f"x_{part}"), getattr(self, f"y_{part}"), getattr(self, f"client_{part}")
            if len(x) == 0 and (needs_test or part == "train"):
                yield f"x_{part} has no samples, but at least one is needed"
            yield from _target_problems(f"y_{part}", y, len(x), max(self.sizes))
            yield from _id_problems(f"client_{part}", ids, len(x))
            yield from _sample_problems(f"x_{part}", x)
            for name, values in ((f"x_{part}", x), (f"y_{part}", y)):
                yield from _not_finite_problems(name, values, ids)
        yield from self._pair_problems()

    def _pair_problems(self) -> Iterator[str]:
        """What is wrong with training and test samples together."""
        if len(self.y_test) and are_classes(self.y_train) != are_classes(self.y_test):
            yield (
                f"y_train has {self.y_train.dtype} targets and y_test {self.y_test.dtype} ones, but both must be "
                "classes, or neither"
            )
        if len(self.y_test) and self.y_train.shape[1:] != self.y_test.shape[1:]:
            yield (
                f"y_train has targets of shape {tuple(self.y_train.shape[1:])} and y_test of shape "
                f"{tuple(self.y_test.shape[1:])}, but both must be the same"
            )
        if self.x_train.shape[1:] != self.x_test.shape[1:] or self.x_train.dtype != self.x_test.dtype:
            yield (
                f"x_train has {self.x_train.dtype} samples of shape {tuple(self.x_train.shape[1:])} and x_test "
                f"{self.x_test.dtype} samples of shape {tuple(self.x_test.shape[1:])}, but both must be the same"
            )
        if self.client_test is not None and self.client_train is None:
            yield "client_train is None, but must be given where client_test is"
        if self.client_test is not None and self.client_train is not None:
            kinds = {ids.dtype.kind for ids in (self.client_train, self.client_test) if len(ids)}
            if len(kinds - {"u"} if "i" in kinds else kinds) > 1:
                yield (
                    f"client_train has {self.client_train.dtype} ids and client_test {self.client_test.dtype} ones, "
                    "but both must be of one type"
                )

    def _normalization_problems(self) -> Iterator[str]:
        if (self.mean is None) != (self.std is None):
            yield (
                f"mean is {self.mean} and std is {self.std}, but either both must be given, or neither, to compute "
                "them from the images"
            )
        if self.mean is None or self.std is None:
            return
        if self.x_train.dtype != torch.uint8:
            samples = f"{self.x_train.dtype} samples"
            yield f"mean is {list(self.mean)}, but must be None for {samples}; only uint8 images are normalized"
        channels = self.x_train.shape[1]
        are_finite = all(map(math.isfinite, [*self.mean, *self.std]))
        if len(self.mean) != channels or len(self.std) != channels or min(self.std) <= 0 or not are_finite:
            yield (
                f"mean is {list(self.mean)} and std is {list(self.std)}, but each must have one number for each of the "
                f"{channels} channels, all finite, and std only ones above 0"
            )


def _target_problems(name: str, y: Tensor, num_samples: int, largest: int) -> Iterator[str]:
    if y.dim() == 0 or len(y) != num_samples:
        yield f"{name} has shape {tuple(y.shape)}, but must hold one label for each of the {num_samples} samples"
    if y.dim() == 1:
        yield from label_problems(name, y, largest)


def _id_problems(name: str, ids: np.ndarray | None, num_samples: int) -> Iterator[str]:
    if ids is None:
        return
    if any(identity != identity for identity in ids.ravel().tolist()):
        yield f"{name} has nan, but ids must be numbers or words that can be told apart"
    if ids.shape != (num_samples,):
        yield f"{name} has shape {ids.shape}, but must hold one id for each of the {num_samples} samples"


def _sample_problems(name: str, x: Tensor) -> Iterator[str]:
    is_image, is_text = x.dtype == torch.uint8 and x.dim() == 4, x.dtype == torch.int64 and x.dim() == 2
    if not (is_image or is_text or x.is_floating_point()):
        yield (
            f"{name} is {x.dtype} of shape {tuple(x.shape)}, but must be uint8 images of shape "
            "(n, channels, height, width), floating point, or int64 ids of words of shape (n, length)"
        )
    if is_text and x.numel() and x.min() < 0:
        yield f"{name} has the id {x.min().item()}, but ids of words must be integers from 0"
    if len(x) and not x.numel() and not is_text:  # texts get their ids later
        yield f"{name} has shape {tuple(x.shape)}, but every sample must have values"


def _not_finite_problems(name: str, values: Tensor, ids: np.ndarray | None) -> Iterator[str]:
    if values.is_floating_point() and not values.isfinite().all():
        sample = int((~values.isfinite()).nonzero()[0, 0])
        client = "" if ids is None else f", of client '{ids[sample]}'"
        yield f"{name} has values that are not finite, first in sample {sample}, counted from 0{client}"


def are_classes(y: Tensor) -> bool:
    """Whether targets are classes: one integer for each sample."""
    return y.dim() == 1 and y.dtype in _INTEGERS


def label_problems(name: str, y: Tensor, num_samples: int) -> Iterator[str]:
    """What is wrong with one number per sample: an integer is a class, a floating-point number is another target.

    Args:
        name: the name of the numbers in the messages.
        y: the numbers, shape (n,).
        num_samples: number of samples of the data set; there may be as many classes, or 1000.
    """
    if not (y.dtype in _INTEGERS or y.is_floating_point()):
        yield f"{name} has {y.dtype} values, but labels must be integers from 0"
    if not len(y) or y.dtype not in _INTEGERS:
        return
    if y.min() < 0:
        yield f"{name} has {y.dtype} numbers from {y.min().item()}, but labels must be integers from 0{_OTHERS}"
    limit = max(_CLASSES, num_samples)
    if y.max() >= limit:
        yield (
            f"{name} has the label {y.max().item()}, but labels must number the classes, from 0 and below {limit}"
            f"{_OTHERS}"
        )


def normalized(arrays: Arrays) -> tuple[Tensor, Tensor]:
    """Returns the samples as a model reads them, and the value of black pixels.

    Images of type uint8 are divided by 255, then the mean of each channel is subtracted and the result divided by the
    standard deviation, with the same operations as torchvision's ``ToTensor`` and ``Normalize``.

    Args:
        arrays: the data set; uint8 images need mean and standard deviation.

    Returns:
        All samples, training samples first, and black, shape (channels, 1, 1). Images and floating-point samples are
        float32, ids of words int64; black is 0 if samples are not normalized.
    """
    if arrays.x_train.dtype == torch.int64:
        return torch.cat((arrays.x_train, arrays.x_test)), torch.zeros(1, 1, 1)
    n = len(arrays.x_train)
    x = torch.empty(n + len(arrays.x_test), *arrays.x_train.shape[1:])
    x[:n], x[n:] = arrays.x_train, arrays.x_test
    if arrays.x_train.dtype != torch.uint8:
        return x, torch.zeros(1, 1, 1)
    assert arrays.mean is not None and arrays.std is not None
    mean, std = (torch.tensor(values).float().view(-1, 1, 1) for values in (arrays.mean, arrays.std))
    return x.div_(255).sub_(mean).div_(std), -mean / std


def _mean_and_std(images: Tensor) -> tuple[Tensor, Tensor]:
    """Computes mean and standard deviation of each channel of uint8 images, from exact counts of the 256 values."""
    counts = torch.stack([images[:, c].flatten().bincount(minlength=256) for c in range(images.shape[1])]).double()
    shares, values = counts / counts.sum(dim=1, keepdim=True), torch.arange(256, dtype=torch.float64) / 255
    mean = shares @ values
    std = (shares @ values**2 - mean**2).clamp(min=0).sqrt()
    return mean, std.where(std > 0, 1.0)  # a channel with a single value becomes 0, not nan
