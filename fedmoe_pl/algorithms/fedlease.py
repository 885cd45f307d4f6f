"""FedLEASE: Wang, Bian, Zhang, Xu, NeurIPS 2025, Algorithm 1 (https://arxiv.org/abs/2509.15087).

===================  =====================  ============================================  =============================
topic                paper                  official code (lei-wang-link/FedLEASE)        here
===================  =====================  ============================================  =============================
after the warm-up    means of the clusters  a client's own adapter, others new; the       means of the clusters
                                            means one round later
head                 not mentioned          never trained, drawn by each client           trained and kept
a single cluster     not mentioned          impossible                                    if all distances are below
                                                                                          1e-6
the client's expert  trained                names are replaced by ``replace('0', k)``,    trained, in the first place
                                            which also hits layers 0 and 10
===================  =====================  ============================================  =============================
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Messages, Parts, copies, private_tensors, received
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.clusters import cluster_of, moved
from fedmoe_pl.algorithms.shared.uploads import IDS, TENSORS, joined, problem_of_upload, upload
from fedmoe_pl.checks import InvalidArgumentError, check_at_least
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models import AdaptiveTokenGate, ClusteredAdapterMoE
from fedmoe_pl.trees import Tree, load_tree, of_module, problem_of_shapes, subtree, with_prefix

_IDS, _CLUSTERS = "clients/ids", "clients/clusters"  # of the clients that are in a cluster, shape (clients,)
_SIZES = "clusters/sizes"  # numbers of clients, shape (K,)
_ROUTERS = "routers/"  # prefix of a cluster's number: its routers, which the server keeps
_OWN = ("global_experts.0.", "gate.routers.")  # what a client trains of the mixture
_SAME = 1e-6  # the largest distance between clients in a single cluster


class FedLEASE(Algorithm):
    """Finds clusters of clients by their adapters; each client trains its cluster's expert and weighs those of all.

    In the first rounds, every client trains an adapter by itself, then the server clusters the clients by the cosine
    distances of their B, averaged over layers, with average linkage. The number of clusters is the one with the highest
    silhouette, from 2 to the model's ``max_clusters``; 1 if all clients are alike. A client receives the experts of all
    clusters and its cluster's routers, and trains the latter and its cluster's expert, which is in the first place. Of
    both, the means over a cluster's clients are taken, with uniform weights. Other parts, such as a head, stay with the
    client. A client that was not in the clustering round, or is not of the federation, has the largest cluster.

    The model is a ``ClusteredAdapterMoE`` with an ``AdaptiveTokenGate``.

    Args:
        warmup_rounds: number of rounds before the clusters are found, at least 1.
    """

    needs = ("all_clients", "own_server_step", "fresh_optimizers")  # any cluster's expert may be in the first place
    parts = Parts(computed=("global_experts", "gate"))

    def __init__(self, warmup_rounds: int = 5) -> None:
        check_at_least(self, "warmup_rounds", warmup_rounds, 1)
        super().__init__(["global_experts.*", "gate.*"], weighting="uniform")
        self.warmup_rounds = warmup_rounds
        self.messages = Messages(per_client=("clients/",), period=warmup_rounds)

    def is_trainable(self, name: str, round: int, epoch: int) -> bool:
        """The first expert and what is no part of the mixture; after the warm-up, the routers."""
        if name.startswith("gate."):
            return round >= self.warmup_rounds
        return name.startswith(_OWN) or not name.startswith("global_experts.")

    def server_init(self, module: LightningModule) -> Tree:
        """The initial experts and routers; refuses other models."""
        if not isinstance(module, ClusteredAdapterMoE) or not isinstance(module.gate, AdaptiveTokenGate):
            raise InvalidArgumentError(self, "model", module, "a ClusteredAdapterMoE with an AdaptiveTokenGate")
        return super().server_init(module)

    def server_send(self, server: Tree, client_id: int, request: Tree) -> Tree:
        """Nothing in the warm-up; then the experts, the client's own first, its routers and the number of clusters."""
        if _SIZES not in server:
            return {}
        number, own = len(server[_SIZES]), _cluster_of_client(server, client_id)
        sent = {"gate.num_clusters": torch.tensor(number), **subtree(server, f"{_ROUTERS}{own}/")}
        for cluster in range(number):
            sent |= moved(server, cluster, {own: 0, 0: own}.get(cluster, cluster))
        return sent

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads what the client has kept, and what it received in place of that."""
        load_tree(client.module, of_module({**client.state, **sent}))
        return {}

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Sends its expert and routers, and keeps the rest; until the end of the warm-up, it keeps them and sends none.

        In the last round of the warm-up, it sends them for the first time.
        """
        own, kept = _of_own(client.module.state_dict()), private_tensors(self, client)
        if client.round + 1 < self.warmup_rounds:
            return Update({}, 1, kept | copies(client, (name for name in own if not name.startswith("gate."))))
        return Update(upload(client.id, own), 1, kept)

    def problem_of_update(
        self, client_id: int, update: Update, initial: Tree, datamodule: FederatedDataModule, round: int
    ) -> str:
        """Nothing until the end of the warm-up, then the client's own expert and routers."""
        if round + 1 < self.warmup_rounds:
            return problem_of_shapes(update.sent, {})
        return problem_of_upload(update.sent, client_id, _of_own(initial), {})

    def combine(self, a: Update, b: Update) -> Update:
        """What single clients have sent."""
        return Update(joined(a.sent, b.sent), a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """Finds the clusters once there are experts; replaces a cluster's expert and routers by its clients' means."""
        if not combined.sent:
            return server
        ids, order = combined.sent[IDS].sort()
        uploads = {name: tensor[order] for name, tensor in subtree(combined.sent, TENSORS).items()}
        new = dict(server)
        if _SIZES not in server:
            places = 1 + max(cluster_of(name) for name in server if name.startswith("global_experts."))
            labels = clusters_of(distances(uploads, ids), most=places)
            new |= {_IDS: ids, _CLUSTERS: labels, _SIZES: labels.bincount()}
        of_updates = torch.tensor([_cluster_of_client(new, id) for id in ids.tolist()])
        for cluster in of_updates.unique().tolist():
            chosen = of_updates == cluster
            means = {name: each[chosen].double().mean(0).to(each) for name, each in uploads.items()}
            routers = {name: mean for name, mean in means.items() if name.startswith("gate.")}
            new |= moved(means, 0, cluster) | with_prefix(routers, f"{_ROUTERS}{cluster}/")
        return new

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """What the client would load now."""
        return of_module({**client.state, **received(self, server, client.id, client.state)})


def _of_own(tensors: Mapping[str, Tensor]) -> Tree:
    """What a client trains of the mixture: its cluster's expert, in the first place, and its routers."""
    return {name: tensor for name, tensor in tensors.items() if name.startswith(_OWN)}


def _cluster_of_client(server: Tree, client_id: int) -> int:
    """A client's cluster; the largest one of a client that was not in the clustering round."""
    known = server[_IDS].tolist() if _IDS in server else []
    return int(server[_CLUSTERS][known.index(client_id)] if client_id in known else server[_SIZES].argmax())


def distances(uploads: Tree, ids: Tensor) -> Tensor:
    """Cosine distances of clients' B, averaged over layers, float64 (n, n), given these B, each (n, ...)."""
    of_layers = []
    for name, stacked in uploads.items():
        if not name.endswith(("lora_B.weight", "lora_embedding_B")):
            continue
        vectors = stacked.flatten(1).double()
        norms = vectors.norm(dim=1, keepdim=True)
        if not norms.all():
            raise MisconfigurationException(
                f"FedLEASE: B of {name} of client {ids[norms.flatten() == 0][0]} is 0 after the warm-up, but must have "
                "been trained, because clients are clustered by it."
            )
        of_layers.append(1 - (vectors / norms) @ (vectors / norms).T)
    return torch.stack(of_layers).mean(0).clamp_min(0).fill_diagonal_(0)


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
