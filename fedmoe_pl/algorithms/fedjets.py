"""FedJETs: Dun, Hipolito Garcia, Zheng, Awadallah, Sim, Kyrillidis, Dimitriadis 2023 (https://arxiv.org/abs/2306.08586).

No code by the authors is known, and only the abstract and descriptions by others could be read. This is an
approximation:

====================  ========================================  ====================================================
topic                 described                                 here
====================  ========================================  ====================================================
common expert         pretrained and frozen; the gate reads     the embedding and the first expert of an earlier
                      its features                              phase; the embedding is frozen, and the gate and the
                                                                experts read its values
initial experts       not described                             copies of that first expert
local loss            not described                             the likelihood of the mixture, as in ``FedMix``
choice of experts     largest mean weights of the gate          as in ``FedMix``
anchor clients        one per expert, with distinct labels,     most distant class shares, chosen by the server;
                      which always train                        in a cohort as often as other clients
prediction            the expert with the largest weight        the same
====================  ========================================  ====================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Parts
from fedmoe_pl.algorithms.client import Client, Constants
from fedmoe_pl.algorithms.shared.parts import pair_of
from fedmoe_pl.algorithms.shared.shared_experts import SharedExperts, expert_of, mixture_loss
from fedmoe_pl.trees import Tree, subtree, with_prefix

_CLIENTS = "anchors/clients"  # the anchor client of each expert, int64 (anchors,)
_EXPERT = "anchors/expert"  # the expert of a client that is an anchor, int64 ()


class FedJETs(SharedExperts):
    """Each client trains the shared gate and its few best experts, on the frozen features of a common expert.

    The phase starts from a federated phase of the same ``SparseMoE`` with the gate ``GlobalOnly``, whose result is the
    common expert. The server averages an expert over the clients that trained it, and the gate over all, by numbers of
    samples.

    Args:
        experts_per_client: number of experts that a client trains.
        anchors: whether each expert has an anchor client. It trains this expert in every round for which it is drawn,
            as any client is, and its loss has the term ``-log p(expert|x)``, so that the gate chooses it. The server
            needs to know the class shares of all clients that take part in the phase.
    """

    parts = Parts(needed=("embedding", "experts"))
    messages = replace(SharedExperts.messages, per_client=(_CLIENTS,))

    def __init__(self, experts_per_client: int = 2, anchors: bool = True) -> None:
        super().__init__(experts_per_client, ["gate.*", "experts.*"])  # the embedding is that of the common expert
        self.anchors = anchors

    def server_init(self, module: LightningModule) -> Tree:
        """The gate, and all experts as copies of the first one."""
        server = super().server_init(module)
        first = subtree(server, "experts.0.")
        for expert in range(_number_of_experts(server)):
            server |= with_prefix({name: tensor.clone() for name, tensor in first.items()}, f"experts.{expert}.")
        return server

    def server_begin(self, server: Tree, clients: Iterable[Client]) -> Tree:
        """Chooses the anchor clients among those that take part in the phase."""
        if not self.anchors:
            return server
        client = next(iter(clients))
        participants = torch.tensor(client.participants)
        rows = most_distant(client.datamodule.class_shares[participants], _number_of_experts(server))
        return {**server, _CLIENTS: participants[rows]}

    def server_send(self, server: Tree, client_id: int, request: Tree) -> Tree:
        """The gate and the experts that the client asked for; tells an anchor its expert."""
        sent = super().server_send(server, client_id, request)
        expert = (server.get(_CLIENTS, torch.empty(0)) == client_id).nonzero().flatten()
        return {**sent, _EXPERT: expert[0]} if len(expert) else sent

    def preferred(self, scores: Tensor, sent: Tree) -> Tensor:
        """An anchor's own expert first, then those with the largest scores."""
        if _EXPERT in sent:
            scores = scores.index_fill(0, sent[_EXPERT], torch.inf)
        return super().preferred(scores, sent)

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the tensors and ranks the experts; -1 stands for no anchor."""
        return {**super().client_init(client, sent), "anchor": int(sent.get(_EXPERT, -1))}

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """The negative log-likelihood of the client's mixture, and an anchor's term."""
        loss, weights, _ = mixture_loss(module, batch, constants["experts"])
        if constants["anchor"] < 0:
            return loss
        expert = torch.where(pair_of(module, batch)[1] == -100, -100, constants["anchor"])
        return loss + F.nll_loss(weights.clamp_min(torch.finfo(weights.dtype).tiny).log(), expert)

    def expert_weights(self, client: Client, experts: list[int]) -> Tensor:
        """The number of samples."""
        return torch.full((len(experts),), len(client.samples), dtype=torch.float64)


def _number_of_experts(server: Tree) -> int:
    return 1 + max(expert for expert in map(expert_of, server) if expert is not None)


def most_distant(shares: Tensor, number: int) -> Tensor:
    """The rows (clients, C) that are farthest from the mean, then from those chosen; of equal ones, the first.

    Example:
        >>> most_distant(torch.tensor([[0.6, 0.4], [1.0, 0.0], [0.0, 1.0], [0.9, 0.1]]), 2)
        tensor([2, 1])
    """
    distances = (shares - shares.mean(0)).abs().sum(1)
    chosen = [int(distances.argmax())]
    distances = torch.full_like(distances, torch.inf)
    while len(chosen) < min(number, len(shares)):
        distances = torch.minimum(distances, (shares - shares[chosen[-1]]).abs().sum(1))
        distances[chosen] = -1  # among equal rows, none is chosen twice
        chosen.append(int(distances.argmax()))
    return torch.tensor(chosen)
