"""All samples for one client, on its own machine in a deployed federation."""

from __future__ import annotations

import numpy as np

from fedmoe_pl.data.partitioners.partitioner import Partitioner


class AllToOne(Partitioner):
    """Gives all samples to one client; those with lower ids, which are on other machines, have none.

    Args:
        client: the client's id.
    """

    needs_classes = False

    def __init__(self, client: int) -> None:
        self.client = client

    def __call__(
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """Returns empty parts, and all samples in their order as the last one."""
        return [np.empty(0, dtype=np.int64)] * self.client + [np.arange(len(labels))]
