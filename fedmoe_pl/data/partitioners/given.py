"""Partitions that the data, a file or a function give."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from fedmoe_pl.checks import InvalidArgumentError, tried
from fedmoe_pl.data.arrays import read_npz
from fedmoe_pl.data.client_names import numbered_clients
from fedmoe_pl.data.partitioners.partitioner import Partitioner, check_parts, group_by
from fedmoe_pl.data.targets import imported

IndexLists = Sequence[Sequence[int]] | Mapping[str, Sequence[int]]


class NaturalIds(Partitioner):
    """Gives every client the samples with its id in the data set, such as one writer's images.

    The clients are numbered in the sorted order of their ids; if all are integers, also as texts, by their size. Ids
    that are texts are the clients' names.
    """

    needs_classes = False

    def __call__(  # noqa: D102
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray] | dict[str, np.ndarray]:
        if client_ids is None:
            reason = "these data have no client ids; FromDatasets and FromDataModule get them by their argument groups"
            raise InvalidArgumentError("data", "partitioner", self, "another one", reason)
        ids, owners = numbered_clients(client_ids)
        _check_number(self, num_clients, len(ids))
        parts = group_by(owners, len(ids))
        return dict(zip(ids.tolist(), parts, strict=True)) if isinstance(ids[0], str) else parts


class PredefinedIndices(Partitioner):
    """Gives every client the samples that lists, a file or a function say.

    Args:
        indices: a list of indices for each client, a dict of such lists, a file with them, or a function that gets the
            classes of the samples, as an array, and returns them. A .json file has a list of lists, or an object with a
            list for each client. An .npz file has an array for each client. Keys of an object, a dict or an .npz file
            are the clients' names. Clients are numbered in the order of the lists. Samples that are in no list are not
            used.

    Raises:
        MisconfigurationException: when samples are dealt, if the lists cannot be read, a list is empty, an index is not
            that of a sample, or occurs twice.
    """

    needs_classes = False

    def __init__(self, indices: str | IndexLists | Callable[[np.ndarray], IndexLists]) -> None:
        self.indices = imported(indices)
        if not (callable(self.indices) or isinstance(self.indices, Iterable)):
            raise InvalidArgumentError(self, "indices", indices, "lists of indices, a file or a function")

    def __call__(  # noqa: D102
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray] | dict[str, np.ndarray]:
        lists: Any = _read(self, self.indices) if isinstance(self.indices, str) else self.indices
        lists = lists(labels) if callable(lists) else lists
        parts = [np.asarray(part) for part in (lists.values() if isinstance(lists, Mapping) else lists)]
        check_parts(self, "indices", self.indices, parts, len(labels))
        if not all(map(len, parts)):
            raise InvalidArgumentError(self, "indices", self.indices, "lists, none of them empty")
        _check_number(self, num_clients, len(parts))
        return dict(zip(map(str, lists), parts, strict=True)) if isinstance(lists, Mapping) else parts


class AllToOne(Partitioner):
    """Gives all samples to one client, on its own machine; those with lower ids, which are elsewhere, have none.

    Args:
        client: the client's id.
    """

    needs_classes = False

    def __init__(self, client: int) -> None:
        self.client = client

    def __call__(  # noqa: D102
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        return [np.empty(0, dtype=np.int64)] * self.client + [np.arange(len(labels))]


def _read(owner: Partitioner, path: str) -> Any:
    if path.endswith(".npz"):
        arrays = read_npz(owner, "indices", path)
        # np.savez has numbered them
        return [*arrays.values()] if all(name.startswith("arr_") for name in arrays) else arrays
    with tried(f"{type(owner).__name__}: '{path}' cannot be read"), open(path, encoding="utf-8") as file:
        return json.load(file)


def _check_number(partitioner: Partitioner, num_clients: int | None, number: int) -> None:
    if num_clients not in (None, number):
        raise InvalidArgumentError(partitioner, "num_clients", num_clients, f"left out or {number}, as in the data")
