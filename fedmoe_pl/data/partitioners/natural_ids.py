"""A partition by the client ids of the data."""

from __future__ import annotations

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.data.partitioners.partitioner import Partitioner, group_by


class NaturalIds(Partitioner):
    """Gives every client the samples with its id in the data set, such as one writer's images.

    The clients are numbered in the sorted order of their ids.
    """

    needs_classes = False

    def __call__(  # noqa: D102
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        if client_ids is None:
            raise MisconfigurationException(
                "partitioner is NaturalIds, but these data have no client ids; use IID or Dirichlet, or provide "
                "client_train or groups."
            )
        ids, owners = np.unique(client_ids, return_inverse=True)
        if num_clients not in (None, len(ids)):
            raise MisconfigurationException(
                f"num_clients is {num_clients}, but the data have {len(ids)} natural clients; leave num_clients out or "
                "choose another partitioner."
            )
        return group_by(owners, len(ids))
