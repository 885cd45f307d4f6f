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

from torch import Tensor

from fedmoe_pl.algorithms.shared.expectation_maximization import ExpectationMaximization
from fedmoe_pl.models import SparseMoE
from fedmoe_pl.models.inputs import Inputs, call


class FedEM(ExpectationMaximization):
    """Each client's model is a mixture of M shared networks with weights of its own.

    The model is ``SparseMoE(embedding=torch.nn.Identity(), expert, num_experts=M, gate=MixtureWeights(),
    mixing="probabilities")``: its experts are whole networks, which start from different draws. The server averages
    every network over the clients of the round, by their numbers of samples and not by their weights. Clients that are
    not in the round keep the weights of their last one. Newcomers estimate only their weights.
    """

    def embedded(self, module: SparseMoE, x: Inputs) -> Tensor:
        """The inputs."""
        return call(module.embedding, x)
