"""Classes that clients or datasets name: one numbering for all, and names that seem misspelt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import chain, count, pairwise
from typing import Any, NamedTuple
from unicodedata import normalize

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset

from fedmoe_pl.checks import InvalidArgumentError, shown
from fedmoe_pl.data.arrays import NO_LABEL
from fedmoe_pl.data.client_names import are_integers
from fedmoe_pl.data.datamodule import FederatedDataModule
from fedmoe_pl.data.map_style import MapStyleData, difference_of_numbers, is_pair
from fedmoe_pl.data.targets import labels_of, read_sample

_CLOSE = 0.75  # how similar two names are of which one may be misspelt
_Table = tuple[np.ndarray, str | None]  # the new number of each class, and the key of the class in a dict


def numbered_classes(owner: FederatedDataModule, names: Sequence[str], clients: Sequence[str]) -> Tensor:
    """The number of each sample's class, int64, shape (n,), given the names of its class and its client.

    Classes are numbered in the order of ``owner.classes``; if that is None, it becomes the names that any client has,
    sorted (integers by their size), and a warning tells which of them may be misspelt. ``-100``, if it is not among
    ``owner.classes``, is no class but says that a sample has no label.

    Raises:
        MisconfigurationException: if a class is not among ``owner.classes``, or appears there twice.
    """
    names = _composed(names)
    holders: dict[str, dict[str, None]] = {}
    for name, client in zip(names, clients, strict=True):
        holders.setdefault(name, {})[client] = None
    if str(NO_LABEL) not in (owner.classes or ()):
        holders.pop(str(NO_LABEL), None)
    if owner.classes is None:
        is_number = are_integers(holders)
        found = sorted(holders, key=int if is_number else None)
        for name, other in pairwise(found if is_number else ()):
            if int(name) == int(other):
                allowed = "given where one number is written in several ways"
                one, another = next(iter(holders[name])), next(iter(holders[other]))
                because = f"client {one} has '{name}' and {'' if one == another else f'client {another} '}'{other}'"
                raise InvalidArgumentError(owner, "classes", None, allowed, because)
        owner.classes = found
        _warn_of_misspelt(owner, holders)
    classes = owner.classes = _composed(owner.classes)
    if unknown := sorted({*holders} - {*classes}):
        because = f"{next(iter(holders[unknown[0]]))} has the class '{unknown[0]}'"
        raise InvalidArgumentError(owner, "classes", owner.classes, "the names of all classes", because)
    if twice := [name for name, number in Counter(classes).items() if number > 1]:
        because = f"'{twice[0]}' appears twice"
        raise InvalidArgumentError(owner, "classes", owner.classes, "the names of all classes, each once", because)
    number = {str(NO_LABEL): NO_LABEL, **{name: label for label, name in enumerate(classes)}}
    return torch.tensor([number[name] for name in names], dtype=torch.int64)


def _composed(names: Sequence[str]) -> list[str]:
    """The names, with an umlaut as one character: archives of macOS have two."""
    return [normalize("NFC", name) for name in names]


def hint_of_values(classes: Sequence[str]) -> str:
    """What helps where values were taken for classes, as the end of a sentence; empty if these are no integers."""
    if not (classes and are_integers(classes)):
        return ""
    return f"; in a table, whole numbers that are values need a decimal point, such as {classes[0]}.0"


def _warn_of_misspelt(owner: FederatedDataModule, holders: dict[str, dict[str, None]]) -> None:
    """Warns of classes of a single client that lacks a class of others with nearly the same name."""
    folded = {name: " ".join(name.casefold().split()) for name in holders}
    for name, (client, *others) in holders.items():
        if others:
            continue
        common = {folded[other]: other for other in holders if len(holders[other]) > 1 and client not in holders[other]}
        if similar := get_close_matches(folded[name], [*common], 1, _CLOSE):
            rank_zero_warn(
                f"{type(owner).__name__}: only {client} has the class '{name}', and it lacks "
                f"'{common[similar[0]]}'; if it is misspelt, correct it, because it counts as a class of its own."
            )


class _Part(NamedTuple):
    """Samples of one dataset, and where they are in the whole."""

    dataset: Any
    positions: np.ndarray
    indices: np.ndarray


class _Names(NamedTuple):
    """The number of each class by its name, and the key of the classes in samples that are dicts, if it is known."""

    numbers: dict[str, int]
    key: str | None = None


def names_of(dataset: Any, indices: np.ndarray, classes: np.ndarray, target_key: str | None = None) -> _Names:
    """The names of a dataset's classes; none if it has none, or not those of these samples.

    Names are those of torchvision (``class_to_idx`` or, without it, ``classes``), but for a dataset with a
    ``target_transform``, or those of a Hugging Face column (``features[...].names``). They count if the samples that
    the indices choose have these classes.
    """
    for names, labels in _known_names(dataset, target_key):
        is_named = {*classes.tolist()} <= {*names.numbers.values()}
        if is_named if labels is None else np.array_equal(labels[indices], classes):
            return names
    return _Names({})


def _known_names(dataset: Any, target_key: str | None) -> Iterator[tuple[_Names, np.ndarray | None]]:
    """Names of classes, and the classes of all samples that they belong to, as far as the dataset has these."""
    features = getattr(dataset, "features", None)
    if isinstance(features, Mapping) and hasattr(dataset, "with_format"):
        for column in sorted(features, key=lambda column: column != target_key):
            names: Any = getattr(features[column], "names", None)
            if _are_names(names):
                numbers = dict(zip(names, range(len(names)), strict=True))
                yield _Names(numbers, column), np.asarray(dataset.with_format(None)[column][:])
        return
    if getattr(dataset, "target_transform", None) is not None:
        return
    numbers: Any = getattr(dataset, "class_to_idx", None)
    names: Any = getattr(dataset, "classes", None)
    if not isinstance(numbers, Mapping):
        numbers = {name: number for number, name in enumerate(names)} if _are_names(names) else {}
    known = {str(n): int(i) for n, i in numbers.items() if isinstance(i, int | np.integer) and i >= 0}
    if known:
        yield _Names(known, target_key), labels_of(dataset)


def _are_names(names: Any) -> bool:
    return isinstance(names, Sequence) and all(isinstance(each, str) for each in names) and len({*names}) == len(names)


def _parts(dataset: Any, positions: np.ndarray, indices: np.ndarray) -> Iterator[_Part]:
    """The datasets that a dataset is made of, with those of its samples that the indices choose."""
    if isinstance(dataset, ConcatDataset):
        ends = np.asarray(dataset.cumulative_sizes)
        of = np.searchsorted(ends, indices, side="right")
        for number, part in enumerate(dataset.datasets):
            mine = of == number
            yield from _parts(part, positions[mine], indices[mine] - (ends[number - 1] if number else 0))
    elif (within := _within(dataset)) is not None:
        inner, places = within
        yield from _parts(inner, positions, places[indices] % max(len(inner), 1))  # some count from the end
    elif len(indices):
        yield _Part(dataset, positions, indices)


def _within(dataset: Any) -> tuple[Any, np.ndarray] | None:
    """The only dataset in a Subset, or in a class of the user's without names, and the places of its samples there."""
    if next(_known_names(dataset, None), None) is not None:
        return None
    found = [value for value in getattr(dataset, "__dict__", {}).values() if _is_dataset(value)]
    if len(found) != 1:
        return None
    places = getattr(dataset, "indices", range(len(found[0])))
    if not hasattr(places, "__len__") or len(places) != len(dataset):
        return None
    return found[0], np.asarray(places, dtype=np.int64)


def _is_dataset(value: Any) -> bool:
    """Whether a value has samples that can be read one by one, and is no plain sequence, mapping or array."""
    values = (str, bytes, Sequence, Mapping, np.ndarray, Tensor, type)
    return hasattr(value, "__getitem__") and hasattr(value, "__len__") and not isinstance(value, values)


def join_by_name(owner: object, data: MapStyleData) -> None:
    """Numbers the classes of all datasets as the first one that names them does, and new names after those.

    Datasets that give a name another number are read through :class:`JoinedByName`. What has no names is used as it is.

    Raises:
        MisconfigurationException: if samples are neither pairs nor dicts with the targets under ``target_key``.
    """
    assert data.classes is not None, "there is nothing to join"
    classes, n = data.classes.numpy().copy(), data.sizes[0]
    wholes = {"train_dataset": classes[:n], "test_dataset": classes[n:], "eval_dataset": classes[:n].copy()}
    parts = [
        (argument, part, names_of(part.dataset, part.indices, wholes[argument][part.positions], data.target_key))
        for argument in wholes
        if (whole := getattr(data, argument)) is not None
        for part in _parts(whole, *2 * [np.arange(len(whole))])
    ]
    unnamed = {
        *chain(*({*wholes[name][part.positions].tolist()} - {*its.numbers.values()} for name, part, its in parts))
    }
    joined, tables, differences = dict[str, int](), dict[str, list[_Table]](), dict[str, str]()
    table_of = {argument: np.zeros(len(whole), dtype=np.int64) for argument, whole in wholes.items()}
    for argument, part, names in parts:
        if difference := difference_of_numbers(names.numbers, joined):
            differences[argument] = difference
            sample = read_sample(getattr(data, argument), int(part.positions[0]))
            if not (names.key in sample if isinstance(sample, Mapping) else is_pair(sample)):
                allowed, kind = "one whose samples are pairs, or dicts with the class", type(part.dataset).__name__
                raise InvalidArgumentError(owner, argument, kind, allowed, f"classes are joined by name: {difference}")
        of_part = wholes[argument][part.positions]
        numbers = np.arange(1 + max(0, *of_part.tolist(), *names.numbers.values()))
        _join(names.numbers, joined, unnamed, numbers)
        table_of[argument][part.positions] = len(tables.setdefault(argument, []))
        tables[argument].append((numbers, names.key))
        wholes[argument][part.positions] = numbers[of_part]
    for argument in differences:
        setattr(data, argument, JoinedByName(getattr(data, argument), tables[argument], table_of[argument]))
    data.class_numbers, data.classes = joined, torch.from_numpy(classes)
    if differences:
        rank_zero_info(
            f"{type(owner).__name__}: datasets number their classes differently ({min(differences.values())}), so they "
            f"are joined by name: {shown(joined)}."
        )


def _join(named: Mapping[str, int], joined: dict[str, int], unnamed: set[int], numbers: np.ndarray) -> None:
    """Sets the new numbers of a dataset's classes, and adds its names to those that are joined already."""
    of_numbers, taken = dict[int, list[str]](), {*joined.values()}
    for name, number in named.items():  # ImageNet's classes have several names
        of_numbers.setdefault(number, []).append(name)
    free = (number for number in count() if number not in taken and number not in unnamed)
    for number, names in sorted(of_numbers.items()):
        known = [joined[name] for name in names if name in joined]
        numbers[number] = known[0] if known else next(free) if number in taken else number
        taken.add(int(numbers[number]))
        joined.update((name, int(numbers[number])) for name in names if name not in joined)


class JoinedByName(Dataset):
    """A dataset whose classes get other numbers as samples are read, which are pairs, or dicts with the class.

    Args:
        dataset: the dataset.
        tables: the new numbers of the classes, for each of its parts.
        table_of: the table of each sample.
    """

    def __init__(self, dataset: Any, tables: list[_Table], table_of: np.ndarray) -> None:
        self.dataset = dataset
        self.tables = tables
        self.table_of = table_of

    def __len__(self) -> int:
        """Number of samples."""
        return len(self.table_of)

    def __getitem__(self, index: int) -> Any:
        """Returns a sample with the new number of its class."""
        sample, (numbers, key) = self.dataset[index], self.tables[self.table_of[index]]
        if isinstance(sample, Mapping):
            return {**sample, key: _renumbered(sample[key], numbers)} if key in sample else sample
        return sample[0], _renumbered(sample[1], numbers)


def _renumbered(target: Any, numbers: np.ndarray) -> Any:
    new = int(numbers[int(target)])
    return torch.full_like(target, new) if isinstance(target, Tensor) else new
