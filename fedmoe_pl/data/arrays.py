"""A data set as arrays, with their checks and the normalization of images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedmoe_pl.checks import InvalidArgumentError

_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_CLASSES = 1000  # a label may be higher only if there are as many samples


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
    """

    x_train: Tensor
    y_train: Tensor
    x_test: Tensor
    y_test: Tensor
    client_train: np.ndarray | None = None
    client_test: np.ndarray | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None

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
        y = torch.cat((self.y_train, self.y_test)) if len(self.y_test) else self.y_train
        return y.long() if are_classes(self.y_train) else y

    def compute_normalization(self, samples: Tensor | None = None) -> None:
        """Sets mean and standard deviation to those of the training images, or of some of them.

        Args:
            samples: indices of the images to use, shape (n,); None for all.
        """
        mean, std = _mean_and_std(self.x_train if samples is None else self.x_train[samples])
        self.mean, self.std = mean.tolist(), std.tolist()

    def check(self, owner: object = "Arrays", needs_test: bool = True) -> None:
        """Refuses arrays that do not fit together.

        Args:
            owner: the data module, which messages name.
            needs_test: whether there must be test samples.

        Raises:
            MisconfigurationException: if there is a problem; the message describes the first one.
        """
        for part in ("train", "test"):
            x, y, ids = getattr(self, f"x_{part}"), getattr(self, f"y_{part}"), getattr(self, f"client_{part}")
            self._check_samples(owner, f"x_{part}", x, needs_values=needs_test or part == "train")
            if y.dim() == 0 or len(y) != len(x):
                raise _refused(owner, f"y_{part}", y, f"a target for each of the {len(x)} samples")
            check_labels(owner, f"y_{part}", y, max(self.sizes))
            if ids is not None and (ids.shape != (len(x),) or any(i != i for i in ids.tolist())):
                raise _refused(owner, f"client_{part}", ids, f"an id, other than nan, for each of the {len(x)} samples")
            for name, values in ((f"x_{part}", x), (f"y_{part}", y)):
                if values.is_floating_point() and not values.isfinite().all():
                    sample = int((~values.isfinite()).nonzero()[0, 0])
                    raise InvalidArgumentError(owner, name, values, "finite", f"sample {sample} is not")
        if self.x_train.shape[1:] != self.x_test.shape[1:] or self.x_train.dtype != self.x_test.dtype:
            raise _refused(owner, "x_test", self.x_test, f"like x_train, {_words(self.x_train)}")
        y, y_test = self.y_train, self.y_test
        if len(y_test) and (are_classes(y) != are_classes(y_test) or y.shape[1:] != y_test.shape[1:]):
            raise _refused(owner, "y_test", y_test, f"like y_train, {_words(y)}")
        self._check_normalization(owner)

    def _check_samples(self, owner: object, name: str, x: Tensor, needs_values: bool) -> None:
        if needs_values and not len(x):
            raise _refused(owner, name, x, "at least one sample")
        is_image, is_text = x.dtype == torch.uint8 and x.dim() == 4, x.dtype == torch.int64 and x.dim() == 2
        if not (is_image or is_text or x.is_floating_point()):
            kinds = "uint8 images of shape (n, channels, height, width), floating point, or int64 ids of words (n, k)"
            raise _refused(owner, name, x, kinds)

    def _check_normalization(self, owner: object) -> None:
        if (self.mean is None) != (self.std is None):
            missing, given = ("mean", "std") if self.mean is None else ("std", "mean")
            raise InvalidArgumentError(owner, missing, None, "given", f"{given} is")
        if self.mean is None or self.std is None:
            return
        if not self.is_images:
            raise InvalidArgumentError(owner, "mean", [*self.mean], "None", "only uint8 images are normalized")
        channels = self.x_train.shape[1]
        allowed = f"{channels} finite numbers, one for each channel"
        for name, values in (("mean", self.mean), ("std", self.std)):
            if len(values) != channels or not all(map(math.isfinite, values)) or (name == "std" and min(values) <= 0):
                raise InvalidArgumentError(owner, name, [*values], f"{allowed}{', above 0' if name == 'std' else ''}")


def _words(values: Tensor | np.ndarray) -> str:
    return f"{values.dtype} of shape {tuple(values.shape)}"


def _refused(owner: object, name: str, values: Tensor | np.ndarray, allowed: str) -> InvalidArgumentError:
    return InvalidArgumentError(owner, name, values, allowed, f"it is {_words(values)}")


def are_classes(y: Tensor) -> bool:
    """Whether targets are classes: one integer for each sample."""
    return y.dim() == 1 and y.dtype in _INTEGERS


def check_labels(owner: object, name: str, y: Tensor, num_samples: int) -> None:
    """Refuses integers that number no classes: there may be 1000 classes, or as many as samples of the data set."""
    limit = max(_CLASSES, num_samples)
    if are_classes(y) and len(y) and (y.min() < 0 or y.max() >= limit):
        wrong = (y.min() if y.min() < 0 else y.max()).item()
        allowed = f"classes from 0 and below {limit}; targets that are no classes are floating point"
        raise InvalidArgumentError(owner, name, y, allowed, f"it has the label {wrong}")


def normalized(arrays: Arrays) -> tuple[Tensor, Tensor]:
    """The samples as a model reads them, (n, ...), training samples first, and black's value, (channels, 1, 1).

    Images of type uint8 are divided by 255, then the mean of each channel is subtracted and the result divided by the
    standard deviation, with the same operations as torchvision's ``ToTensor`` and ``Normalize``. Other samples are not
    changed; their black is 0.
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
