"""A partition that a file or a function gives."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.data.partitioners.partitioner import Partitioner
from fedmoe_pl.data.targets import imported


class PredefinedIndices(Partitioner):
    """Gives every client the samples that a file or a function says.

    Args:
        indices: a file with a list of indices for each client, or a function that gets the classes of the samples, as
            an array, and returns such lists. A .json file has a list of lists, or an object with a list for each
            client. An .npz file has an array for each client. Clients are numbered in the order of the lists. Samples
            that are in no list are not used.

    Raises:
        MisconfigurationException: if the file does not exist or is of another type; when samples are dealt, if it
            cannot be read, if an index is not that of a sample, or is there twice.
    """

    needs_classes = False

    def __init__(self, indices: str | Callable[[np.ndarray], Sequence[Sequence[int]]]) -> None:
        self.indices = indices = imported(indices)
        if isinstance(indices, str) and not (indices.endswith((".json", ".npz")) and os.path.isfile(indices)):
            raise MisconfigurationException(
                f"PredefinedIndices: indices is '{indices}', but must be a .json or .npz file "
                f"('{os.path.abspath(indices)}'), or a function or its import path."
            )

    def __call__(  # noqa: D102
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        name = self.indices if isinstance(self.indices, str) else getattr(self.indices, "__name__", "a function")
        prefix = f"PredefinedIndices: indices is {name!r}"
        try:
            lists = _read(self.indices) if isinstance(self.indices, str) else self.indices(labels)
            parts = [np.asarray(part) for part in (lists.values() if isinstance(lists, Mapping) else lists)]
        except Exception as error:  # whatever a damaged file or a user's function raises
            reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
            raise MisconfigurationException(
                f"{prefix}, but must give a list of indices for each client ({reason})."
            ) from error
        _check(prefix, parts, len(labels))
        if num_clients not in (None, len(parts)):
            raise MisconfigurationException(
                f"num_clients is {num_clients}, but must be None or {len(parts)}, the number of lists of "
                "PredefinedIndices."
            )
        return [part.astype(np.int64) for part in parts]


def _read(path: str) -> Any:
    if path.endswith(".npz"):
        with np.load(path) as file:
            return {name: file[name] for name in file.files}
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def _check(prefix: str, parts: Sequence[np.ndarray], num_samples: int) -> None:
    for client, part in enumerate(parts):
        if part.ndim != 1 or (len(part) and part.dtype.kind not in "iu"):
            raise MisconfigurationException(f"{prefix}, but must give client {client} a list of integers.")
        if not len(part):
            raise MisconfigurationException(f"{prefix}, but must give client {client} at least one sample.")
    if not parts:
        raise MisconfigurationException(f"{prefix}, but must give at least one client a sample.")
    together = np.concatenate(parts)
    if together.min() < 0 or together.max() >= num_samples:
        wrong = together.min() if together.min() < 0 else together.max()
        raise MisconfigurationException(
            f"{prefix}, which has the index {wrong}, but must have indices from 0 to {num_samples - 1}."
        )
    values, counts = np.unique(together, return_counts=True)
    if counts.max() > 1:
        raise MisconfigurationException(
            f"{prefix}, which has the index {values[counts.argmax()]} twice, but must have no sample twice."
        )
