"""A data set as arrays, with their checks and the normalization of images."""

from __future__ import annotations

import math
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmoe_pl.checks import InvalidArgumentError, reason_of, tried

NO_LABEL = -100
"""The class of a training sample without a label, which PyTorch's cross-entropy leaves out."""
_INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_MOST_UNPACKED, _MOST_TIMES = 2**30, 100  # bytes of an archive, beyond which they are at most so many times its own
_NEAR = 0.8  # likeness of two names of which one is probably misspelt
_CLASSES = 1000  # a label may be higher only if there are as many samples


@dataclass
class Arrays:
    """A data set as it was read, before normalization and partition.

    A training sample whose class is -100 has no label. It is in its client's batches like any other, and counts there
    as in PyTorch's cross-entropy: the loss of a batch is the mean over its samples with a label; that of a batch
    without any is nan and has a gradient of 0. Such samples are never held out, and count in no weight of an update, in
    no class count and in no metric. Each client needs one with a label. Partitioners that deal by class are refused,
    and so are phases in which such samples could count: those with another algorithm than ``FedAvg``, ``FedRep``,
    ``Local``, ``FineTuning`` and ``PFLMoE``, or your own with ``samples_in_loss_only``, and some settings of these.

    Attributes:
        x_train: training samples: uint8 images, shape (n, channels, height, width), which are normalized; floating
            point of any shape (n, ...); or int64 ids of words, from 0, shape (n, length).
        y_train: their targets: classes, shape (n,), integers from 0, or -100, or bool; or others, which are not
            changed, such as numbers, several labels per sample or masks: floating point of shape (n, ...), or any type
            of shape (n, k, ...).
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

    def check(self, owner: object, needs_test: bool) -> None:
        """Refuses arrays that do not fit together, by the name of the data module that owns them."""
        for part in ("train", "test"):
            x, y, ids = getattr(self, f"x_{part}"), getattr(self, f"y_{part}"), getattr(self, f"client_{part}")
            for name, values in ((f"x_{part}", x), (f"y_{part}", y)):
                if not isinstance(values, Tensor):
                    raise InvalidArgumentError(owner, name, values, "a tensor, as torch.as_tensor makes of an array")
            if ids is not None and not hasattr(ids, "shape"):
                raise InvalidArgumentError(owner, f"client_{part}", ids, "an array, as np.asarray makes of a list")
            is_image, is_text = x.dtype == torch.uint8 and x.dim() == 4, x.dtype == torch.int64 and x.dim() == 2
            kinds = "uint8 images of shape (n, channels, height, width), floating point, or int64 ids of words (n, k)"
            _require(is_image or is_text or x.is_floating_point(), owner, f"x_{part}", x, kinds)
            _require(y.shape[:1] == x.shape[:1], owner, f"y_{part}", y, f"a target for each of the {len(x)} samples")
            check_labels(owner, f"y_{part}", y, max(self.sizes), may_lack=part == "train")
            if ids is not None:
                has_ids = ids.shape == (len(x),) and not any(map(is_missing, ids.tolist()))
                allowed = f"an id, other than nan and None, for each of {len(x)} samples"
                _require(has_ids, owner, f"client_{part}", ids, allowed)
            for name, values in ((f"x_{part}", x), (f"y_{part}", y)):
                if values.is_floating_point() and not (finite := values.isfinite()).all():
                    place = tuple((~finite).nonzero()[0].tolist())  # of the sample, then in it
                    number = (~finite.reshape(len(values), -1)).any(1).sum()
                    because = f"{number} of {len(values)} samples have such values, the first one is number {place[0]}"
                    raise InvalidArgumentError(owner, f"{name}{[*place]}", values[place].item(), "finite", because)
        x, x_test, y, y_test = self.x_train, self.x_test, self.y_train, self.y_test
        _require(len(x_test) > 0 or not needs_test, owner, "x_test", x_test, "at least one sample")
        is_alike = x.shape[1:] == x_test.shape[1:] and x.dtype == x_test.dtype
        _require(is_alike, owner, "x_test", x_test, f"like x_train, {type_and_shape(x)}")
        is_alike = are_classes(y) == are_classes(y_test) and y.shape[1:] == y_test.shape[1:]
        _require(is_alike or not len(y_test), owner, "y_test", y_test, f"like y_train, {type_and_shape(y)}")
        self._check_normalization(owner)

    def _check_normalization(self, owner: object) -> None:
        if self.mean is None and self.std is None:
            return
        for name, values, other in (("mean", self.mean, self.std), ("std", self.std, self.mean)):
            if not self.is_images:
                because = f"only uint8 images are normalized, and x_train is {type_and_shape(self.x_train)}"
                raise InvalidArgumentError(owner, name, values, "left out", because)
            if values is None or other is None:
                allowed = f"given together with {'std' if name == 'mean' else 'mean'}"
                raise InvalidArgumentError(owner, name, values, allowed)
            allowed = f"a finite number{' above 0' if name == 'std' else ''} for each channel"
            is_fit = all(math.isfinite(value) and (value > 0 or name == "mean") for value in values)
            if len(values) != self.x_train.shape[1] or not is_fit:
                because = f"the images have {self.x_train.shape[1]} channel(s)"
                raise InvalidArgumentError(owner, name, values, allowed, because)


def type_and_shape(values: Tensor | np.ndarray) -> str:
    """The data type and the shape of an array, in words."""
    return f"{values.dtype} of shape {tuple(values.shape)}"


def _require(condition: bool, owner: object, name: str, values: Tensor | np.ndarray, allowed: str) -> None:
    if not condition:
        raise InvalidArgumentError(owner, name, values, allowed, f"it is {type_and_shape(values)}")


def is_missing(value: Any) -> bool:
    """Whether a value is None, nan or pandas' NA, which cannot be compared."""
    return value is None or repr(value) == "<NA>" or bool(value != value)


def are_classes(y: Tensor) -> bool:
    """Whether targets are classes: one integer for each sample."""
    return y.dim() == 1 and y.dtype in _INTEGERS


def check_labels(owner: object, name: str, y: Tensor, num_samples: int, may_lack: bool = False) -> None:
    """Refuses integers that number no classes: there may be 1000 classes, or as many as samples of the data set.

    Samples may have no label if ``may_lack``, but not all of them.
    """
    limit = max(_CLASSES, num_samples)
    if not (are_classes(y) and len(y)):
        return
    labels = y[y != NO_LABEL] if may_lack and (y == NO_LABEL).any() else y
    least, most = (labels.min().item(), labels.max().item()) if len(labels) else (NO_LABEL, NO_LABEL)
    if least < 0 or most >= limit:
        none = f", or {NO_LABEL} for some samples, which have none" if may_lack else ""
        allowed = f"classes from 0 and below {limit}{none}; targets that are no classes are floating point"
        raise InvalidArgumentError(owner, name, y, allowed, f"it has the label {least if least < 0 else most}")


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


def mean_and_std(images: Tensor) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel of uint8 images, from exact counts of the 256 values."""
    counts = torch.stack([images[:, c].flatten().bincount(minlength=256) for c in range(images.shape[1])]).double()
    shares, values = counts / counts.sum(dim=1, keepdim=True), torch.arange(256, dtype=torch.float64) / 255
    mean = shares @ values
    std = (shares @ values**2 - mean**2).clamp(min=0).sqrt()
    return mean.tolist(), std.where(std > 0, 1.0).tolist()  # a channel with a single value becomes 0, not nan


def _array_of(file: Any, name: str) -> np.ndarray:
    """An array of a file; a refusal names it."""
    try:
        return file[name]
    except ValueError as error:  # such as an array of objects, as pandas makes of texts
        hint = "it must be an array of numbers or, as from .astype(str), of texts"
        raise ValueError(f"{name}: {reason_of(error)}; {hint}") from error


def read_npz(owner: object, argument: str, path: str | Path, names: Sequence[str] = ()) -> dict[str, np.ndarray]:
    """The arrays in an .npz file, or those of them that are named; ``argument`` is the owner's that gives the path.

    Raises:
        MisconfigurationException: if the file cannot be read, has other members, or would fill the memory: more than
            1 GiB from an archive of less than a hundredth of it.
    """
    path, kind = Path(path), "an .npz file"
    if not path.is_file() or not zipfile.is_zipfile(path):  # the latter would wait for a pipe
        because = f"'{path}' {'is of another kind' if path.exists() else 'does not exist'}"
        raise InvalidArgumentError(owner, argument, str(path), kind, because)
    with tried(f"{type(owner).__name__}: '{path}' cannot be read"), np.load(path) as file:
        size, unpacked = path.stat().st_size, sum(part.file_size for part in file.zip.infolist())
        if unpacked > max(_MOST_UNPACKED, _MOST_TIMES * size):
            because = f"its {size:,} bytes are {unpacked:,} unpacked; if this is right, write it with np.savez"
            raise InvalidArgumentError(owner, argument, str(path), "an archive that does not fill the memory", because)
        for name in file.files if names else ():  # a name that is not taken may be a misspelt one
            if name not in names and (near := get_close_matches(name, [*{*names} - {*file.files}], 1, _NEAR)):
                raise InvalidArgumentError(owner, argument, str(path), f"a file with {near[0]}", f"it has {name}")
        arrays = {name: _array_of(file, name) for name in names or file.files if name in file}
    if others := [name for name, array in arrays.items() if not isinstance(array, np.ndarray)]:  # bytes of other files
        raise InvalidArgumentError(owner, argument, str(path), "a file of arrays", f"{others[0]} of '{path}' is none")
    return arrays
