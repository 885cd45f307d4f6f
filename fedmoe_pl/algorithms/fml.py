"""FML, federated mutual learning: Shen et al. 2020, Algorithm 1 (https://arxiv.org/abs/2006.16765).

===================  ===========================  ============================  =======================================
topic                paper                        official code                 here
===================  ===========================  ============================  =======================================
communication        meme models are averaged     commented out                 as in the paper
weights of clients   uniform                      uniform                       ``weighting="uniform"``
momentum             not mentioned                the private model's is kept,  new in every round, or, with the
                                                  the meme's is new             phase's ``keep_optimizer``, both kept
result               not mentioned                best epoch on test data       last round; or ``select`` of the phase
===================  ===========================  ============================  =======================================
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Parts, Weighting
from fedmoe_pl.algorithms.client import Constants
from fedmoe_pl.algorithms.shared.parts import both_logits, distillation_loss, logits_loss, pair_of
from fedmoe_pl.checks import check_number


class FML(Algorithm):
    """A private model and a shared "meme" model teach each other; only the meme is averaged.

    The private model is ``local_expert``, which may be of another architecture, also from client to client; the meme is
    ``global_expert``. Both take their steps on the same batch, each with its own loss, in which the other's output is a
    constant. Use the gate ``LocalOnly`` to evaluate the private models, as in the paper.

    Args:
        alpha: weight of cross-entropy in the private model's loss, from 0 to 1; the rest is the divergence from the
            meme's softmax. 1 trains it alone.
        beta: the same for the meme; 1 is FedAvg of the meme.
        shared: glob patterns of the parameters and buffers that are averaged.
        weighting: how the average weighs clients, as in :class:`~fedmoe_pl.algorithms.FedAvg`.
    """

    parts = Parts(local_expert_predicts=True)
    needs = ("classes", "fixed_gate")

    def __init__(
        self,
        alpha: float = 0.5,
        beta: float = 0.5,
        shared: str | list[str] = "global_expert.*",
        weighting: Weighting = "uniform",
    ) -> None:
        check_number(self, "alpha", alpha, least=0, most=1)
        check_number(self, "beta", beta, least=0, most=1)
        super().__init__(shared, ["global_expert.*", "local_expert.*"], weighting)
        self.alpha = alpha
        self.beta = beta

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """The sum of both models' losses; their gradients do not interact."""
        x, y = pair_of(module, batch)
        private, meme = both_logits(module, x)
        private_loss = self.alpha * logits_loss(module, private, y)
        private_loss = private_loss + (1 - self.alpha) * distillation_loss(private, meme, y)
        meme_loss = self.beta * logits_loss(module, meme, y)
        meme_loss = meme_loss + (1 - self.beta) * distillation_loss(meme, private, y)
        return private_loss + meme_loss
