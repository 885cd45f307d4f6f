"""pFedMM: FedEM with a shared backbone (https://github.com/Archipes/pFedMM, a fork of FedEM's code).

"Mixture of Experts for Personalized Federated Learning under Mixture Data Distributions in Edge Computing Networks",
2026. The paper was not available; this follows the code. It trains the backbone with the learning rate M lr. Here, the
gradient that reaches the backbone is multiplied by M:

==================  ============================  ===============================================
optimizer           official code                 here
==================  ============================  ===============================================
SGD, with momentum  learning rate M lr            the same steps
weight decay        a step of M lr decay          a step of lr decay on the backbone
Adam                steps M times as long         no difference: Adam divides by the gradients
averages            samples of all clients        samples of the round's clients, as in ``FedEM``
==================  ============================  ===============================================
"""

from __future__ import annotations

from torch import Tensor

from fedmoe_pl.algorithms.fedem import FedEM
from fedmoe_pl.models import SparseMoE
from fedmoe_pl.models.inputs import Inputs


class PFedMM(FedEM):
    """Each client's model is a shared backbone and a mixture of M shared heads with weights of its own.

    The model is ``SparseMoE(backbone, head, num_experts=M, gate=MixtureWeights(), mixing="probabilities")``. All heads
    and the backbone are trained by one loss, see :class:`FedEM`. Clients that are not in the round keep the weights of
    their last one. Newcomers estimate only their weights.
    """

    def embedded(self, module: SparseMoE, x: Inputs) -> Tensor:
        """The backbone's values; its gradients are M times as large."""
        z = super().embedded(module, x)
        return z + (len(module.experts) - 1) * (z - z.detach())
