"""FedEM: Marfoq, Neglia, Bellet, Kameni, Vidal, NeurIPS 2021, Algorithm 1 (https://arxiv.org/abs/2108.10252).

==================  =====================================  ============================  ===============================
topic               paper                                  official code                 here
==================  =====================================  ============================  ===============================
weights, experts    samples of the round's clients         samples of all clients; the   samples of the round's clients
                                                           absent keep the old experts
optimizer           not mentioned                          kept from round to round      fresh, or ``keep_optimizer``
new clients         estimate pi until it converges         one estimate per evaluation   one estimate per local round
==================  =====================================  ============================  ===============================
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Patterns
from fedmoe_pl.algorithms.client import Client, Constants
from fedmoe_pl.algorithms.shared.parts import (
    check_mixing,
    check_sparse,
    computed_with,
    evaluation_copy,
    pair_of,
    pairs_of,
)
from fedmoe_pl.models import MixtureWeights, SparseMoE
from fedmoe_pl.models.inputs import Inputs, call
from fedmoe_pl.models.layers import evaluating
from fedmoe_pl.trees import Tree, load_tree, precise

_PI = "gate.weights"


class FedEM(Algorithm):
    """Each client's model is a mixture of M shared networks with weights of its own.

    The model is ``SparseMoE(embedding=torch.nn.Identity(), expert, num_experts=M, gate=MixtureWeights(),
    mixing="probabilities")``: its experts are whole networks, which start from different draws. The server averages
    every network over the clients of the round, by their numbers of samples and not by their weights. Clients that are
    not in the round keep the weights of their last one. Newcomers estimate only their weights.

    In each round, a client receives the experts, and in this order:

    * E step: the responsibility of expert m for a training sample s is ``q_sm = softmax_m(log pi_m - l_m(s))`` with the
      expert's cross-entropy ``l_m(s)`` in eval mode and the client's weights pi.
    * The new weights are ``pi_m = mean_s q_sm``. They stay with the client, which predicts with ``sum_m pi_m
      softmax(z_m)``.
    * M step: trains with the loss ``1 / |B| sum_{s in B} sum_m q_sm l_m(s)``, where q stays the same for the round.

    A batch does not say which samples it has, so that q is computed anew for each batch, from the experts as they were
    received. It is the q of the E step, unless samples are augmented: then it is that of the augmented sample.
    """

    needs = ("classes",)

    def __init__(self) -> None:
        super().__init__()
        self.shared = Patterns("*", excluded=[_PI])  # clients keep their weights of the experts

    def server_init(self, module: LightningModule) -> Tree:
        """The experts; refuses other models than experts that are mixed with ``MixtureWeights``."""
        check_sparse(self, module, lambda gate: isinstance(gate, MixtureWeights), "MixtureWeights")
        check_mixing(self, module, "probabilities")
        return super().server_init(module)

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the tensors, and takes the E step on all training samples."""
        super().client_init(client, sent)
        module = client.module
        constants = {"received": sent, "log_pi": precise(module.state_dict()[_PI]).log()}
        if len(client.samples):
            load_tree(module, {_PI: _mean_responsibilities(client, constants["log_pi"])})
        return constants

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """The loss of the M step; samples with the label -100 do not count."""
        assert isinstance(module, SparseMoE)
        x, y = pair_of(module, batch)
        with torch.no_grad(), evaluating(module):
            losses = computed_with(module, constants["received"], _losses_of_inputs, x, y)
            responsibilities = (constants["log_pi"] - losses).softmax(1)
        losses = _losses(module, self.embedded(module, x), y)
        return (responsibilities * losses).sum() / (y != -100).sum().clamp_min(1)

    def embedded(self, module: SparseMoE, x: Inputs) -> Tensor:
        """What the experts read in the M step, from inputs (B, ...)."""
        return call(module.embedding, x)


def _losses(module: SparseMoE, z: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy of every sample and expert, shape (B, M); 0 for samples with the label -100."""
    losses = [F.cross_entropy(precise(expert(z)), y, reduction="none") for expert in module.experts]
    return torch.stack(losses, dim=1)


def _losses_of_inputs(module: SparseMoE, x: Inputs, y: Tensor) -> Tensor:
    return _losses(module, call(module.embedding, x), y)


@torch.no_grad()
def _mean_responsibilities(client: Client, log_pi: Tensor) -> Tensor:
    """The mean of the responsibilities over the client's training samples, shape (M,), on the CPU."""
    batches = client.batches(client.samples)
    module: Any = evaluation_copy(client, batches)
    prior, pairs = log_pi.to(batches.device), pairs_of(module, batches)
    sums = [(prior - _losses_of_inputs(module, x, y)).softmax(1).double().sum(0) for x, y in pairs]
    return (torch.stack(sums).sum(0) / len(client.samples)).to(log_pi)
