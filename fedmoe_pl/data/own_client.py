"""The data of a single client of a deployed federation, on its own machine."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.data.client_samples import ClientSamples
from fedmoe_pl.data.datamodule import FederatedDataModule

_MOST = 10**8  # numbers of the table of classes, of 8 bytes each


def add_clients(datamodule: FederatedDataModule, num_clients: int, num_classes: int) -> None:
    """Adds the other clients of a deployed federation, without samples, to the only one that has some."""
    if num_clients * num_classes > _MOST:
        raise MisconfigurationException(
            f"the server has {num_clients} clients and {num_classes} classes, but their product must be "
            f"at most {_MOST}."
        )
    for name in ("train_samples", "validation_samples", "test_samples"):
        parts: ClientSamples = getattr(datamodule, name)
        sizes = torch.cat((parts.sizes, parts.sizes.new_zeros(num_clients - len(parts))))
        setattr(datamodule, name, ClientSamples(parts.indices, sizes))
    datamodule.num_clients, datamodule.num_classes = num_clients, num_classes
    counts = datamodule.class_counts()
    datamodule.class_shares = counts / counts.sum(dim=1, keepdim=True)
