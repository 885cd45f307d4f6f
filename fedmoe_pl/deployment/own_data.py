"""A client's own data: how they are set up, and what the server is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.checkpoints.configuration import configuration
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.partitioners.given import AllToOne
from fedmoe_pl.evaluation.outputs import described_batches
from fedmoe_pl.setup.data import set_up


def own_data(datamodule: FederatedDataModule, client: int, federation: Any) -> FederatedDataModule:
    """Sets a client's data up: all training samples are its own."""
    name = type(datamodule).__name__
    if datamodule.rotations is not None:
        raise MisconfigurationException(
            f"{name}: rotations is {datamodule.rotations}, but must be left out where a client has its own data."
        )
    datamodule.partitioner = AllToOne(client)
    set_up(datamodule, federation.phases, federation.seed)
    if datamodule.has_learned:
        what = "vocabulary" if datamodule.normalization is None else "mean and std"
        raise MisconfigurationException(
            f"{name}: {what} must be given in a deployed federation, because each client would compute its own."
        )
    if not all(isinstance(tensor, Tensor) for tensor in _first_sample(datamodule)):
        raise MisconfigurationException(
            f"{name}: collate_fn gives {described_batches(datamodule)}, but must give pairs of tensors in a deployed "
            "federation, because the server knows no other samples."
        )
    return datamodule


def _first_sample(datamodule: FederatedDataModule) -> Sequence[Any]:
    """Input and target of the first sample, each as a batch of one; nothing certain if batches are no pairs."""
    if datamodule.reader is None:
        return datamodule.x[:1], datamodule.y[:1]
    (batch,) = datamodule.batches(torch.arange(1))
    if not datamodule.has_pairs:
        return [None]
    return batch[0], datamodule.y[:1] if datamodule.num_classes else batch[1]


def described(federation: Any, model: LightningModule, datamodule: FederatedDataModule, client: int) -> dict[str, Any]:
    """What a client tells the server of its data: sizes, the shape and type of a sample, the number of classes."""
    parts = datamodule.train_samples, datamodule.validation_samples, datamodule.test_samples
    x, y = _first_sample(datamodule)
    return {
        "client": client,
        "sizes": [len(part[client]) for part in parts],
        "global_test": len(datamodule.global_test),
        "shape": [*x.shape[1:]],
        "dtype": str(x.dtype).removeprefix("torch."),
        "target_shape": [*y.shape[1:]],
        "target_dtype": str(y.dtype).removeprefix("torch."),
        "num_classes": datamodule.num_classes,
        "normalization": None if datamodule.normalization is None else [*map(list, datamodule.normalization)],
        "configuration": configuration(federation, model, datamodule),
        "torch": str(torch.__version__),
    }
