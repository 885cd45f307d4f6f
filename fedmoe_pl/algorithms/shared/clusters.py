"""Clusters of clients: their models in a ``ClusteredMoE``, the choice of one for a client, and groups by distance."""

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
from fedmoe_pl.seeds import derive_seed
from fedmoe_pl.trees import Tree, copy_module, subtree, with_prefix

DRAWS = 1000
"""How often initial models are drawn before ``good_init`` is given up."""
_CHOICE = 73  # separates the random numbers of a client's choice of a cluster from its others
_DRAW = 74  # separates those of the initial models that are drawn anew
_SAME = 1e-6  # the largest distance between clients in a single cluster


def experts_of(module: LightningModule) -> Sequence[nn.Module]:
    """The models of the clusters."""
    if not isinstance(module, ClusteredMoE):
        raise InvalidArgumentError("Federation", "model", module, "a ClusteredMoE")
    return [*module.global_experts]


def chosen_models(clients: Sequence[Client], share: float) -> Tree | None:
    """Initial models of the clusters, drawn anew until each is chosen by a share of the clients."""
    module = clients[0].module
    assert isinstance(module, ClusteredMoE)
    clusters = range(len(module.global_experts))
    for draw in range(DRAWS):
        if draw:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(derive_seed(clients[0].seed, _DRAW, draw))
                module.draw_clusters()
        chosen = [best_cluster(client, clusters, choice_generator(client)) for client in clients]
        if min(chosen.count(cluster) for cluster in clusters) >= share * len(clients) - 1e-9:
            state = {name: tensor.clone() for name, tensor in module.global_experts.state_dict().items()}
            return with_prefix(state, "global_experts.")
    return None


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


def clusters_of(distances: Tensor, most: int) -> Tensor:
    """The cluster of each client, int64 (n,), numbered in the order of their first clients.

    Of average linkage, with the number of clusters from 2 to ``most`` that has the highest silhouette; if several have,
    the lowest. One cluster if no distance reaches 1e-6.
    """
    from sklearn.cluster import AgglomerativeClustering
    from sklearn.metrics import silhouette_score

    best, found = -2.0, torch.zeros(len(distances), dtype=torch.int64)
    if distances.max() < _SAME:
        return found
    for number in range(2, min(most, len(distances)) + 1):
        linkage = AgglomerativeClustering(number, metric="precomputed", linkage="average")
        labels = linkage.fit_predict(distances.numpy())
        # a client that is alone in its cluster has the silhouette 0
        score = silhouette_score(distances.numpy(), labels, metric="precomputed") if number < len(labels) else 0.0
        if score > best:
            numbers = {label: place for place, label in enumerate(dict.fromkeys(labels.tolist()))}
            best, found = score, torch.tensor([numbers[label] for label in labels.tolist()])
    return found
