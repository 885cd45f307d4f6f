"""A partition at random into equal parts."""

from __future__ import annotations

import numpy as np

from fedmoe_pl.data.partitioners.partitioner import LabelPartitioner


class IID(LabelPartitioner):
    """Shuffles the samples and cuts them into parts whose sizes differ by at most one.

    Example:
        >>> parts = IID()(np.zeros(10, dtype=int), 3, np.random.default_rng(0))
        >>> [len(part) for part in parts]
        [4, 3, 3]
    """

    needs_classes = False

    def partition(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Deals the samples."""
        return np.array_split(rng.permutation(len(labels)), num_clients)
