"""Reads the targets and groups of a dataset's samples, and puts continuous targets into bins."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from fedmoe_pl.checks import InvalidArgumentError, check_at_least
from fedmoe_pl.data.arrays import are_classes
from fedmoe_pl.data.map_style import is_pair
from fedmoe_pl.seeds import seeded

Values = str | Callable[[Any], Sequence[Any]]
"""How a value of each sample of a dataset is found.

A function, or its import path, gets the dataset and returns one value for each sample. Another word is the name of such
values in the dataset, an attribute, or else the key of the value in each sample, a dict.
"""
_ATTRIBUTES = ("targets", "labels")  # of torchvision's datasets


def imported(values: Any) -> Any:
    """A function that is given by its import path, as in YAML; other values as they are.

    With ``str`` first in a type, jsonargparse leaves words as they are; otherwise it could not write them down again.

    Example:
        >>> imported("math.sqrt"), imported("label"), imported("labels.json")
        (<built-in function sqrt>, 'label', 'labels.json')
    """
    if not isinstance(values, str) or "." not in values:
        return values
    try:
        found = pkgutil.resolve_name(values)
    except (ImportError, AttributeError, ValueError):
        return values
    return found if callable(found) else values


class Samples:
    """The samples of a dataset, which are read once for all values that are found in them.

    Args:
        owner: the data module that a refusal names.
        dataset: a map-style dataset.
        keys: keys whose values will be asked for, if they are keys of the samples.
    """

    def __init__(self, owner: object, dataset: Any, keys: Iterable[object] = ()) -> None:
        self.owner = owner
        self.dataset = dataset
        self.keys = [key for key in keys if isinstance(key, str)]
        self._columns: dict[Any, list[Any]] = {}

    def first(self) -> Any:
        """The first sample."""
        return read_sample(self.dataset, 0)

    def column(self, key: Any) -> list[Any]:
        """What each sample has under a key, or at an index."""
        if key not in self._columns:
            rank_zero_info(
                f"{type(self.owner).__name__} reads all {len(self.dataset):,} samples of {type(self.dataset).__name__} "
                "once for their classes or groups; an attribute or a function that gives them would be faster."
            )
            first = self.first()
            others = [other for other in self.keys if isinstance(first, dict) and other in first]
            keys = {key, *(other for other in others if np.ndim(first[other]) == 0)}
            self._columns |= {each: [] for each in keys}
            for index in range(len(self.dataset)):
                sample = read_sample(self.dataset, index)
                for each in keys:
                    self._columns[each].append(sample[each])
        return self._columns[key]


def classes_of(samples: Samples, targets: Values | None) -> Tensor | None:
    """The classes of a dataset's samples, int64, shape (n,); None if the targets are not one integer for each sample.

    Without ``targets``, they are the attribute ``targets`` or ``labels`` or, if neither has an integer for each sample,
    the second items of samples that are pairs.
    """
    dataset = samples.dataset
    if isinstance(targets, str):
        sample = samples.first()
        if isinstance(sample, dict) and targets in sample and not _is_class(sample[targets]):
            return None  # batches have them under the key
    if targets is not None:
        values = values_of(samples, "targets", targets)
    else:  # an attribute has them before the transform
        values = None if _transforms_targets(dataset) else labels_of(dataset)
        if values is None and is_pair(first := samples.first()) and _is_class(first[1]):
            values = samples.column(1)
    if values is None:
        return None
    array = _to_array(values)
    if _are_classes(array):
        return torch.from_numpy(array.astype(np.int64))
    if targets is None:
        return None
    allowed = "left out or classes, one integer for each sample"
    reason = f"it gives {array.dtype} values of shape {array.shape}"
    raise InvalidArgumentError(samples.owner, "targets", targets, allowed, reason)


def labels_of(dataset: Any) -> np.ndarray | None:
    """The integers that a dataset has as its attribute ``targets`` or ``labels``; None if it has none."""
    found = (_attribute(dataset, name) for name in _ATTRIBUTES)
    arrays = (_to_array(values) for values in found if values is not None)
    return next((array for array in arrays if _are_classes(array)), None)


def values_of(samples: Samples, argument: str, values: Values) -> np.ndarray:
    """A value of each sample, for the argument that says how they are found."""
    owner, dataset = samples.owner, samples.dataset
    found = values(dataset) if callable(values) else _attribute(dataset, values)
    if found is None and isinstance(values, str):
        sample = samples.first()
        try:
            sample[values]
        except (LookupError, TypeError) as error:  # it has other keys, only indices or neither
            keys = ", ".join(map(str, sample)) if isinstance(sample, Mapping) else "they have none"
            allowed = f"an attribute of the dataset or a key of its samples ({keys})"
            raise InvalidArgumentError(owner, argument, values, allowed) from error
        found = _column(dataset, values)
        if found is None:
            found = samples.column(values)
    array = _to_array(found)
    if array.shape[:1] != (len(dataset),):
        allowed, reason = f"a value for each of {len(dataset)} samples", f"it gives values of shape {array.shape}"
        raise InvalidArgumentError(owner, argument, values, allowed, reason)
    return array


def _attribute(dataset: Any, name: str) -> Any | None:
    """The values under this name, also those of a part of a dataset; None if there are none."""
    if isinstance(dataset, Subset):
        values = _attribute(dataset.dataset, name)
        return None if values is None else _to_array(values)[np.asarray(dataset.indices, dtype=np.int64)]
    if isinstance(dataset, ConcatDataset):
        parts = [_attribute(part, name) for part in dataset.datasets]
        return None if any(part is None for part in parts) else np.concatenate([_to_array(part) for part in parts])
    values: Any = getattr(dataset, name, None)
    return values if hasattr(values, "__len__") and len(values) == len(dataset) else None


def _column(dataset: Any, name: str) -> Any | None:
    """A column of a Hugging Face ``Dataset``; None of others, and where a function of the user makes samples."""
    layout = getattr(dataset, "format", None)
    if not isinstance(layout, dict) or layout.get("type") == "custom" or name not in dataset.column_names:
        return None
    return dataset[name][:]


def _transforms_targets(dataset: Any) -> bool:
    """Whether a dataset or a part of it has a ``target_transform``, as torchvision's datasets do."""
    if isinstance(dataset, Subset):
        return _transforms_targets(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return any(map(_transforms_targets, dataset.datasets))
    return getattr(dataset, "target_transform", None) is not None


def _are_classes(array: np.ndarray) -> bool:
    return array.ndim == 1 and array.dtype.kind in "iub"


def _is_class(value: Any) -> bool:
    return np.ndim(value) == 0 and np.asarray(value).dtype.kind in "iub"


def read_sample(dataset: Any, index: int) -> Any:
    """A sample of a dataset; what its transforms draw at random is the same each time."""
    with seeded(index):
        return dataset[index]


def _to_array(values: Any) -> np.ndarray:
    if isinstance(values, Tensor):
        return values.numpy()
    try:
        array = np.asarray(values)
    except ValueError:  # lists of several lengths, such as the boxes in each image
        return np.fromiter(values, dtype=object)
    # NumPy makes a text of nan among texts
    has_nan = array.dtype.kind in "US" and array.ndim == 1 and any(value != value for value in values)
    return np.asarray(values, dtype=object) if has_nan else array


def quantile_bins(owner: object, targets: Tensor, num_training: int, num_bins: int) -> Tensor:
    """The bin of each target, int64, shape (n,), from 0 for the lowest.

    The edges are quantiles of the first ``num_training`` targets, so that as many of these are in each bin, up to one.
    Equal targets are in the same bin: frequent ones make it larger, and there may be fewer bins.
    """
    check_at_least(owner, "target_bins", num_bins, 2)
    values = targets.flatten()
    if are_classes(targets) or len(values) != len(targets):
        because = f"quantiles need one number for each sample, and {_described(targets)}"
        raise InvalidArgumentError(owner, "target_bins", num_bins, "left out", because)
    training = values[:num_training].sort().values
    if (different := len(training.unique_consecutive())) < num_bins:
        because = "so many different targets have the training samples"
        raise InvalidArgumentError(owner, "target_bins", num_bins, f"at most {different}", because)
    edges = torch.stack([part[0] for part in training.tensor_split(num_bins)[1:]]).unique()
    return torch.bucketize(values, edges[edges > training[0]], right=True)


def _described(targets: Tensor) -> str:
    if are_classes(targets):
        return "these are classes"
    shape = tuple(targets.shape[1:])
    return f"targets have shape {shape}" if targets.numel() else "samples that are read one by one have unknown targets"
