"""APFL: Deng, Kamani, Mahdavi, 2020, Algorithm 1 and Eq. (10) (https://arxiv.org/abs/2003.13461).

===========  =============================  ================================  ==========================================
topic        paper                          official code (FedTorch)          here
===========  =============================  ================================  ==========================================
mixture      weights a v + (1 - a) w        logits of v and w                 weights
step of v    gradient at the mixture        after the step of w               gradient at the mixture before both steps
             before both steps
step of a    gradient <df(v-bar), v - w>    once per round, on the first      once per round, on all training samples;
             in every step                  batch; df has the factors a and   no decay; ``alpha_lr``
                                            1 - a once more; decay of 0.02;
                                            off by default
average      uniform                        uniform                           ``weighting``
===========  =============================  ================================  ==========================================

Of other implementations, litian96's has a fixed a of 0.5. PFLlib trains v alone, steps a in every batch, and overwrites
v by the mixture after each round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Weighting
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.parts import expert_loss, logits_loss, pair_of, trained_parameters, training_gradient
from fedmoe_pl.algorithms.shared.personal_model import PersonalModel
from fedmoe_pl.checks import check_number
from fedmoe_pl.models.inputs import call
from fedmoe_pl.trees import Tree, difference, inner_product, subtree, with_prefix

_ALPHA = "mixture/alpha"  # name of the weight that a client keeps


class APFL(PersonalModel):
    """FedAvg of ``w``, and a personal mixture of weights ``alpha v + (1 - alpha) w``; evaluate the mixture.

    ``w`` is the module's ``global_expert``, ``v`` its ``local_expert``, which starts as a copy of the first ``w``. The
    gradient of ``v`` is that of the mixture's loss, times ``alpha``. A client keeps ``v`` and ``alpha``; later phases
    go on from ``v``, but begin with a new ``alpha``. What it uses is the mixture of its ``v`` and the newest ``w``: it
    takes the place of the local expert, so that a phase with the gate ``LocalOnly`` evaluates it. An evaluation after
    local training is one of ``v``. Buffers are not mixed: running statistics of batch normalization are the mixture's
    own.

    Args:
        alpha: weight of ``v``, from 0 to 1, at first or, if ``alpha_lr`` is 0, always. 0 is FedAvg, 1 is ``Local``.
        alpha_lr: step size, at least 0, of each client's own ``alpha``, along the derivative of its mean loss, at the
            start of every round; ``alpha`` stays between 0 and 1.
        weighting: ``uniform`` gives all clients the same weight, as in the paper; ``samples`` weighs a client's ``w``
            by its number of training samples.
    """

    parts = replace(PersonalModel.parts, computed=("local_expert",))

    def __init__(self, alpha: float = 0.5, alpha_lr: float = 0.0, weighting: Weighting = "uniform") -> None:
        check_number(self, "alpha", alpha, least=0, most=1)
        check_number(self, "alpha_lr", alpha_lr, least=0)
        super().__init__(weighting)
        self.alpha = alpha
        self.alpha_lr = alpha_lr

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads ``w`` and ``v``; returns ``alpha`` after its step: ``alpha - alpha_lr <df(v-bar), v - w>``."""
        super().client_init(client, sent)
        v = trained_parameters(client.module, "local_expert")
        w = dict(client.module.get_submodule("global_expert").named_parameters())
        alpha = client.state.get(_ALPHA, torch.tensor(self.alpha, dtype=next(iter(v.values())).dtype))
        if self.alpha_lr:
            with torch.no_grad():
                mixture, away = with_prefix(_mixture(alpha, v, w), "local_expert."), difference(v, w)
            slope = inner_product(training_gradient(client, "local_expert", mixture), away)
            alpha = (alpha - self.alpha_lr * slope).clamp(0, 1)
        return {"alpha": alpha}

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """The losses of ``w`` and of the mixture, in which ``w`` is a constant."""
        (x, y), part = pair_of(module, batch), module.get_submodule("local_expert")
        v, w = (dict(module.get_submodule(expert).named_parameters()) for expert in ("local_expert", "global_expert"))
        mixture = _mixture(constants["alpha"], v, {name: tensor.detach() for name, tensor in w.items()})
        of_mixture = logits_loss(module, call(part, x, mixture), y)
        return expert_loss(module, "global_expert", batch) + of_mixture

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Sends ``w``; keeps ``v`` and ``alpha``."""
        update = super().client_final(client, constants)
        update.state[_ALPHA] = constants["alpha"]
        return update

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """The mixture of the client's ``v`` and the server's ``w``, as the local expert."""
        tensors = super().personal_tensors(client, server)
        v, w = (subtree(tensors, prefix) for prefix in ("local_expert.", "global_expert."))
        names = dict(client.module.get_submodule("local_expert").named_parameters())
        mixture = _mixture(client.state.get(_ALPHA, self.alpha), {name: v[name] for name in names}, w)
        return {**tensors, **with_prefix(mixture, "local_expert.")}


def _mixture(alpha: Tensor | float, v: Mapping[str, Tensor], w: Mapping[str, Tensor]) -> Tree:
    """The weights ``alpha v + (1 - alpha) w`` by the names of ``v``."""
    return {name: alpha * tensor + (1 - alpha) * w[name] for name, tensor in v.items()}
