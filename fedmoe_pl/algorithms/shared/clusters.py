"""Clusters of clients: their models in a ``ClusteredMoE``, and the choice of one for a client."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Generator, Tensor, nn

from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.algorithms.shared.parts import pairs_of, summed_loss
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import SampleBatches
from fedmoe_pl.models import ClusteredMoE, FixedGate
from fedmoe_pl.models.inputs import call
from fedmoe_pl.trees import Tree, copy_module, subtree, with_prefix

_CHOICE = 73  # separates the random numbers of a client's choice of a cluster from its others


def experts_of(module: LightningModule) -> Sequence[nn.Module]:
    """The models of the clusters."""
    if not isinstance(module, ClusteredMoE):
        raise InvalidArgumentError("Federation", "model", module, "a ClusteredMoE")
    return [*module.global_experts]


def check_first_place(module: LightningModule) -> None:
    """Refuses a module that uses experts other than ``global_experts.0``."""
    experts_of(module)
    gate = module.gate
    if not (isinstance(gate, FixedGate) and gate.active == [0]):
        raise InvalidArgumentError(module, "gate", gate, "GlobalOnly", "a client uses one cluster's model at a time")


def cluster_of(name: str) -> int:
    """The cluster of a tensor ``global_experts.<cluster>...``."""
    return int(name.split(".")[1])


def moved(tree: Mapping[str, Tensor], source: int | str, target: int | str) -> Tree:
    """The tensors of one cluster under the names of another."""
    return with_prefix(subtree(tree, f"global_experts.{source}."), f"global_experts.{target}.")


def cluster_in_use(module: LightningModule, server: Mapping[str, Tensor]) -> int | None:
    """The cluster whose model a client has in the first place; None if it is none of the server's."""
    own = module.state_dict()
    for cluster in range(len(experts_of(module))):
        model = moved(server, cluster, 0)
        if model and all(torch.equal(own[name].cpu(), tensor.cpu()) for name, tensor in model.items()):
            return cluster
    return None


def choice_generator(client: Client) -> Generator:
    """A separate generator for the choice, so that the client's dropout and batches do not depend on it."""
    return client.generator(_CHOICE)


def best_cluster(client: Client, clusters: Sequence[int], generator: Generator) -> int:
    """The cluster with the lowest mean loss on the client's training samples.

    If several losses are lowest, one is drawn; nan counts as infinite.
    """
    if len(clusters) == 1:
        return clusters[0]
    batches = client.batches(client.samples)
    losses = torch.stack([mean_loss(client.module, cluster, batches) for cluster in clusters])
    losses = losses.where(~losses.isnan(), math.inf)
    lowest = (losses == losses.min()).nonzero().flatten()
    return clusters[int(lowest[torch.randint(len(lowest), (), generator=generator)])]


@torch.no_grad()
def mean_loss(module: LightningModule, cluster: int, batches: SampleBatches) -> Tensor:
    """Mean loss of a cluster's model in eval mode: float64 (), on the CPU. It is computed on the data's device."""
    assert isinstance(module, ClusteredMoE)
    expert = copy_module(module.global_experts[cluster]).to(batches.device).eval()
    sums = [summed_loss(module, module.scores_of(call(expert, x)), y) for x, y in pairs_of(module, batches)]
    return torch.stack(sums).sum().cpu() / len(batches.samples)
