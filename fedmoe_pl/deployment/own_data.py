"""A client's own data: how they are set up, and what the server is told of them."""

from __future__ import annotations

from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule

from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.partitioners.all_to_one import AllToOne
from fedmoe_pl.rounds.configuration import configuration
from fedmoe_pl.rounds.opt_in import set_up
from fedmoe_pl.rounds.run_maker import RunMaker


def own_data(datamodule: FederatedDataModule, client: int, federation: RunMaker) -> FederatedDataModule:
    """Sets a client's data up: all training samples are its own.

    Raises:
        MisconfigurationException: if the data module divides images by rotation, or learns from the data what all
            clients must have in common.
    """
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
    return datamodule


def described(
    federation: RunMaker, model: LightningModule, datamodule: FederatedDataModule, client: int
) -> dict[str, Any]:
    """What a client tells the server of its data: sizes, the shape and type of a sample, the number of classes."""
    parts = datamodule.train_samples, datamodule.validation_samples, datamodule.test_samples
    x, y = datamodule.x[:1], datamodule.y[:1]
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
