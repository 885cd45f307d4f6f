"""Ditto: Li, Hu, Beirami, Smith, ICML 2021, Algorithm 1 (https://arxiv.org/abs/2012.04221).

=============  =================================  ====================================  ================================
topic          paper                              official code (litian96/ditto)        here
=============  =================================  ====================================  ================================
local work     s steps of v and some of w         one batch: a step of v, a step of w   one batch: one step of both
average of w   uniform                            uniform; clients are drawn with       ``weighting``; clients are drawn
                                                  probabilities p_k ~ n_k               uniformly
lambda         one, or chosen by client           one, or chosen in every step on       one, ``weight``
                                                  validation data
=============  =================================  ====================================  ================================

The two steps do not depend on each other, so their order makes no difference.
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Weighting
from fedmoe_pl.algorithms.client import Client, Constants
from fedmoe_pl.algorithms.shared.parts import expert_loss, trained_parameters
from fedmoe_pl.algorithms.shared.personal_model import PersonalModel
from fedmoe_pl.checks import check_number
from fedmoe_pl.trees import Tree, squared_distance, subtree


class Ditto(PersonalModel):
    """FedAvg of ``w``, and a personal ``v`` whose loss has the term ``weight / 2 ||v - w_t||^2``; evaluate ``v``.

    ``w_t`` is the ``w`` that the client received in this round. ``w`` is the module's ``global_expert`` and does not
    depend on ``v``, the ``local_expert``, which starts as a copy of the first ``w``. A phase with the gate
    ``LocalOnly`` evaluates ``v``.

    Args:
        weight: lambda, the weight of the term, at least 0; with 0, ``v`` is trained as in ``Local``.
        weighting: ``uniform`` gives all clients the same weight, as in the paper; ``samples`` weighs a client's ``w``
            by its number of training samples.
    """

    def __init__(self, weight: float = 1.0, weighting: Weighting = "uniform") -> None:
        check_number(self, "weight", weight, least=0)
        super().__init__(weighting)
        self.weight = weight

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the tensors; returns the parameters ``w_t`` for the loss."""
        super().client_init(client, sent)
        received = subtree(sent, "global_expert.")
        return {"received": {name: received[name] for name in trained_parameters(client.module, "local_expert")}}

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """The losses of ``w`` and ``v``, and the term that keeps ``v`` near ``w_t``."""
        v = dict(module.get_submodule("local_expert").named_parameters())
        of_w, of_v = (expert_loss(module, expert, batch) for expert in ("global_expert", "local_expert"))
        return of_w + of_v + self.weight / 2 * squared_distance(constants["received"], v)
