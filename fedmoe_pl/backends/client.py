"""Prepares a client for its local training, in the same way in every backend."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_map

from fedmoe_pl.algorithms.algorithm import Client
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.data import Batches, FederatedDataModule
from fedmoe_pl.models import SwitchNorm1d
from fedmoe_pl.seeds import derive_seed, seed_all
from fedmoe_pl.trees import Tree

_TRAINING, _BATCHES = 0, 3  # separate the random numbers of a client's model and batches from each other and others


def begin_client(
    training: LocalTraining, module: LightningModule, server: Tree, client_id: int, kept: Mapping[int, Tree], round: int
) -> tuple[Client, dict[str, Any], Tensor]:
    """Seeds the client's random numbers and loads its state into a module.

    Args:
        training: the local training of the phase's clients.
        module: a copy of the phase's module, with its initial tensors.
        server: the server's state.
        client_id: the client's id.
        kept: the tensors that clients kept from earlier rounds, by client.
        round: the round of the phase, counted from 0.

    Returns:
        The client, the constants for its loss as the algorithm made them, and the indices of the samples that it
        trains on.
    """
    algorithm = training.algorithm
    seed_all(derive_seed(training.seed, _TRAINING, client_id, training.rounds_before + round))
    sent = algorithm.server_send(server, client_id)
    client = Client(
        id=client_id,
        round=round,
        seed=training.seed,
        module=module,
        samples=training.datamodule.train_samples[client_id],
        kept=kept.get(client_id, {}),
        loaded={**training.initial, **sent},
        datamodule=training.datamodule,
        rounds=training.rounds,
        rounds_before=training.rounds_before,
    )
    const = algorithm.client_init(client, sent)
    return client, const, algorithm.client_samples(client)


def on_device(const: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """The constants of a client's loss, with all tensors in them (also nested ones) on a device."""
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, const)


def client_batches(training: LocalTraining, client: Client, samples: Tensor) -> Batches:
    """The client's training batches of this round, shuffled and augmented by the client's own generator."""
    return training.datamodule.batches(
        samples,
        batch_size=training.batch_size,
        generator=client.generator(_BATCHES),
        augment=True,
        drop_single=has_batch_norm(client.module),
        device=training.device,
    )


def trainable_names(training: LocalTraining, module: nn.Module, round: int, epoch: int | None = None) -> list[str]:
    """Names of the parameters that are trained in a local epoch, or in any epoch of the round if ``epoch`` is None."""
    epochs = range(training.max_epochs) if epoch is None else [epoch]
    is_trainable = training.algorithm.is_trainable
    return [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and any(is_trainable(name, round, epoch) for epoch in epochs)
    ]


def data_on(datamodule: FederatedDataModule, device: torch.device) -> FederatedDataModule:
    """The data module with its samples on a GPU if they fit into half of its free memory; otherwise unchanged."""
    if device.type != "cuda" or datamodule.x.nbytes > torch.cuda.mem_get_info(device)[0] // 2:
        return datamodule
    placed = copy.copy(datamodule)
    placed.x = datamodule.x.to(device)
    return placed


def has_batch_norm(module: LightningModule) -> bool:
    """Whether the module has batch normalization, which cannot be trained on a batch of one sample."""
    return any(isinstance(part, (_BatchNorm, SwitchNorm1d)) for part in module.modules())
