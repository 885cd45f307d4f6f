"""Equally many samples for every client, at random."""

from __future__ import annotations

import numpy as np

from fedmoe_pl.data.partitioners.partitioner import Partitioner, check_num_clients


class IID(Partitioner):
    """Shuffles the samples and cuts them into parts whose sizes differ by one at most.

    Example:
        >>> parts = IID()(np.zeros(10, dtype=int), 3, np.random.default_rng(0))
        >>> [len(part) for part in parts]
        [4, 3, 3]
    """

    def __call__(  # noqa: D102  (described in the base class)
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        num_clients = check_num_clients(num_clients, len(labels), self)
        return np.array_split(rng.permutation(len(labels)), num_clients)
