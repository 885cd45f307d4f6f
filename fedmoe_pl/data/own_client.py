"""The data of a single client of a deployed federation, on its own machine."""

from __future__ import annotations

import torch

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data.client_names import ClientNames
from fedmoe_pl.data.client_samples import ClientSamples
from fedmoe_pl.data.datamodule import FederatedDataModule

_MOST = 10**8  # numbers of the table of classes, of 8 bytes each


def add_clients(datamodule: FederatedDataModule, num_clients: int, num_classes: int) -> None:
    """Adds the other clients of a deployed federation, without samples, to the only one that has some."""
    if num_clients * num_classes > _MOST:
        allowed = f"at most {_MOST // num_classes} with {num_classes} classes"
        raise InvalidArgumentError("the server", "num_clients", num_clients, allowed)
    for name in ("train_samples", "validation_samples", "test_samples"):
        parts: ClientSamples = getattr(datamodule, name)
        sizes = torch.cat((parts.sizes, parts.sizes.new_zeros(num_clients - len(parts))))
        setattr(datamodule, name, ClientSamples(parts.indices, sizes))
    datamodule.num_clients, datamodule.num_classes = num_clients, num_classes
    datamodule.client_names = ClientNames.numbers(num_clients)
    counts = datamodule.class_counts()
    datamodule.class_shares = counts / counts.sum(dim=1, keepdim=True)
