"""Shared experts of which each client trains the few that the shared gate prefers: the base of FedMix and FedJETs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Messages, shapes_of_shared
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.parts import check_sparse, evaluation_copy, pair_of, pairs_of
from fedmoe_pl.checks import check_at_least
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models import FixedGate, SparseMoE
from fedmoe_pl.models.inputs import call
from fedmoe_pl.models.mixtures.mixing import mix_outputs
from fedmoe_pl.trees import Tree, mean_of_two, of_module, precise, problem_of_shapes, subtree, with_prefix

_ASKED = "experts/asked"  # the numbers of the experts that a client asks for, int64 (k,)
_WEIGHT = "experts/weight/"  # prefix of an expert's number: its weight in the mean, float64 ()


class SharedExperts(Algorithm, ABC):
    """The server averages the gate over all clients of a round, and each expert over those that trained it.

    A client ranks the experts by the mean of the received gate's weights of its training samples. It asks for the first
    ones in its next round, because it sends its request before it receives the new gate. In its first round it receives
    all, and trains the first ones. An expert that nobody trained stays as it is. All clients are evaluated with all
    experts: their accuracies with the one that the gate prefers for a sample, their ``validation_loss`` is the trained
    negative log-likelihood, over all experts.

    Args:
        experts_per_client: number of experts that a client trains, at least 1; all if there are fewer.
        parts: glob patterns of the parameters and buffers that are trained and averaged.
    """

    needs = ("classes",)
    messages = Messages(request=(_ASKED,), weights=(_WEIGHT,))  # no request in a client's first round

    def __init__(self, experts_per_client: int = 2, parts: str | list[str] = "*") -> None:
        check_at_least(self, "experts_per_client", experts_per_client, 1)
        super().__init__(shared=parts, trainable=parts)
        self.experts_per_client = experts_per_client

    @abstractmethod
    def expert_weights(self, client: Client, experts: list[int]) -> Tensor:
        """The weights of a client's trained experts in their means, float64 (k,), above 0."""

    def preferred(self, scores: Tensor, sent: Tree) -> Tensor:
        """The order of the experts for a client, best first, from the gate's mean weights (experts,)."""
        return scores.argsort(descending=True, stable=True)

    def server_init(self, module: LightningModule) -> Tree:
        """What is shared; refuses models without a trained gate."""
        check_sparse(self, module, lambda gate: not isinstance(gate, FixedGate), "a gate that is trained")
        return super().server_init(module)

    def server_send(self, server: Tree, client_id: int, request: Tree) -> Tree:
        """The gate, the embedding if it is shared, and the experts that the client asked for."""
        if _ASKED not in request:
            return of_module(server)
        asked = request[_ASKED].tolist()
        return {name: tensor for name, tensor in of_module(server).items() if expert_of(name) in (None, *asked)}

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the tensors and ranks the experts."""
        super().client_init(client, sent)
        best = self.preferred(_mean_weights(client), sent)[: self.experts_per_client].sort().values
        return {"experts": client.state.get(_ASKED, best).tolist(), "next": best}

    def validation_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """The negative log-likelihood of the client's mixture, or of all experts."""
        assert isinstance(module, SparseMoE)
        return mixture_loss(module, batch, constants.get("experts", [*range(len(module.experts))]))[0]

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Sends all that is shared but the experts that the client did not train; keeps its next request."""
        update, experts = super().client_final(client, constants), constants["experts"]
        sent = {name: tensor for name, tensor in update.sent.items() if expert_of(name) in (None, *experts)}
        weights = self.expert_weights(client, experts)
        sent |= {f"{_WEIGHT}{expert}": weight for expert, weight in zip(experts, weights, strict=True)}
        return Update(sent, update.weight, {**update.state, _ASKED: constants["next"]})

    def problem_of_update(
        self, client_id: int, update: Update, initial: Tree, datamodule: FederatedDataModule, round: int
    ) -> str:
        """The gate, the experts that have a weight, and these weights: each above 0, and at most all samples."""
        experts = {expert_of(name) for name in of_module(update.sent)}
        shapes = {name: shape for name, shape in shapes_of_shared(self, initial).items() if expert_of(name) in experts}
        shapes |= {f"{_WEIGHT}{expert}": () for expert in experts if expert is not None}
        if problem := problem_of_shapes(update.sent, shapes):
            return problem
        weights, most = subtree(update.sent, _WEIGHT).values(), max(len(datamodule.train_samples[client_id]), 1)
        fits = len(weights) <= self.experts_per_client and all(0 < weight <= most for weight in weights)
        return "" if fits else "has the weights of other samples"

    def combine(self, a: Update, b: Update) -> Update:
        """The weighted mean of each expert over those who trained it, and of everything else over all."""
        weights_a, weights_b = subtree(a.sent, _WEIGHT), subtree(b.sent, _WEIGHT)
        others = {name: tensor for name, tensor in of_module(a.sent).items() if expert_of(name) is None}
        sent = {**a.sent, **b.sent, **mean_of_two(others, a.weight, b.sent, b.weight)}
        for expert in weights_a.keys() & weights_b.keys():
            weight_a, weight_b = weights_a[expert], weights_b[expert]
            trees = [subtree(update.sent, f"experts.{expert}.") for update in (a, b)]
            mean = mean_of_two(trees[0], weight_a.item(), trees[1], weight_b.item())
            sent |= {**with_prefix(mean, f"experts.{expert}."), _WEIGHT + expert: weight_a + weight_b}
        return Update(sent, a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """Replaces all that was trained."""
        return {**server, **of_module(combined.sent)}

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """The server's model with all experts."""
        return of_module(server)


def mixture_loss(module: LightningModule, batch: Any, experts: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of ``-log sum_k p(k|x) p(y|x, k)`` over a client's k experts, and what an algorithm's terms may use.

    Samples with the label -100 do not count.

    Returns:
        The loss, the gate's weights of all experts (B, experts), and those of the client's experts, which add up to 1,
        (B, k).
    """
    assert isinstance(module, SparseMoE)
    x, y = pair_of(module, batch)
    z = call(module.embedding, x)
    weights = precise(module.gate(z))
    chosen = weights[:, experts]
    renormalized = chosen / chosen.sum(1, keepdim=True).clamp_min(torch.finfo(chosen.dtype).tiny)
    scores = mix_outputs([module.experts[expert](z) for expert in experts], renormalized, "probabilities")
    return F.nll_loss(scores, y), weights, renormalized


def expert_of(name: str) -> int | None:
    """The number of the expert that a tensor of the module belongs to; None for other parts."""
    return int(name.split(".")[1]) if name.startswith("experts.") else None


@torch.no_grad()
def _mean_weights(client: Client) -> Tensor:
    """The gate's mean weights over the client's training samples in eval mode, shape (experts,), on the CPU."""
    batches = client.batches(client.samples)
    module = evaluation_copy(client, batches)
    assert isinstance(module, SparseMoE)
    sums = [module.gate(call(module.embedding, x)).double().sum(0) for x, _ in pairs_of(module, batches)]
    return torch.stack(sums).sum(0).cpu() / len(client.samples)
