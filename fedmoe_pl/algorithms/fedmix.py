"""FedMix: Reisser, Louizos, Gavves, Welling 2021, "Federated Mixture of Experts" (https://arxiv.org/abs/2107.06724).

No code by the authors is known, and only the abstract and descriptions by others could be read. This is an
approximation:

====================  =================================================  ==========================================
topic                 described                                          here
====================  =================================================  ==========================================
choice of experts     the most probable under the gate that was          the same in a client's first round, later
                      received, before anything else is downloaded       under the gate of its last round
entropy               keeps the experts in equal use                     of a batch's mean weights of the client's
                                                                         experts
responsibilities      weigh a client in the mean of an expert            of the trained experts, in eval mode
prediction            not described                                      the expert with the largest weight
====================  =================================================  ==========================================
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.client import Client, Constants
from fedmoe_pl.algorithms.shared.parts import evaluation_copy, pair_of, pairs_of
from fedmoe_pl.algorithms.shared.shared_experts import SharedExperts, mixture_loss
from fedmoe_pl.checks import check_number
from fedmoe_pl.models import SparseMoE
from fedmoe_pl.models.inputs import call
from fedmoe_pl.trees import precise


class FedMix(SharedExperts):
    """Each client trains the shared gate and the few shared experts that are most probable for its data.

    The loss is ``-log sum_k p(k|x) p(y|x, k)`` over the client's experts k, minus an entropy. The server averages an
    expert with the weights ``n_i r_ik``, with the mean responsibility ``r_ik`` of expert k for the samples of client i,
    and the gate and the embedding with the weights ``n_i``.

    Args:
        experts_per_client: number of experts that a client trains.
        entropy_weight: weight, at least 0, of the entropy of the gate's mean weights over a batch; more of it uses the
            experts more equally.
    """

    def __init__(self, experts_per_client: int = 2, entropy_weight: float = 0.1) -> None:
        check_number(self, "entropy_weight", entropy_weight, least=0)
        super().__init__(experts_per_client)
        if entropy_weight:
            self.needs += ("whole_batches",)
        self.entropy_weight = entropy_weight

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """The negative log-likelihood of the client's mixture, minus the weighted entropy."""
        loss, _, weights = mixture_loss(module, batch, constants["experts"])
        labelled = (pair_of(module, batch)[1] != -100).to(weights.dtype)
        marginal = labelled @ weights / labelled.sum()  # (k,)
        return loss + self.entropy_weight * torch.xlogy(marginal, marginal).sum()

    @torch.no_grad()
    def expert_weights(self, client: Client, experts: list[int]) -> Tensor:
        """The sums of the responsibilities of the trained experts for the client's samples."""
        batches = client.batches(client.samples)
        module = evaluation_copy(client, batches)
        assert isinstance(module, SparseMoE)
        total = torch.full((len(experts),), torch.finfo(torch.float64).tiny, dtype=torch.float64)
        for x, y in pairs_of(module, batches):
            z = call(module.embedding, x)
            losses = [F.cross_entropy(precise(module.experts[k](z)), y, reduction="none") for k in experts]
            gate = precise(module.gate(z))[:, experts]
            logarithms = gate.clamp_min(torch.finfo(gate.dtype).tiny).log()  # all of them may underflow
            total += (logarithms - torch.stack(losses, 1)).softmax(1).double().sum(0).cpu()
        return total
