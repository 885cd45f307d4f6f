"""pFedMe: T. Dinh, Tran, Nguyen, NeurIPS 2020, Algorithm 1 (https://arxiv.org/abs/2006.08848).

================  ===========================  ===================================  ====================================
topic             paper                        official code (CharlieDinh/pFedMe)   here
================  ===========================  ===================================  ====================================
inner problem     to a given accuracy          K gradient steps, with a decay of    ``inner_steps`` gradient steps;
                                               0.001                                ``decay``, 0
first theta       any                          w at the start of a round, then the  the same
                                               last one
who trains        all clients; the server      the same                             the clients of the round
                  averages a sample of them
average           uniform                      by samples                           ``weighting``
evaluated theta   theta                        by a slip, the client's w            theta
================  ===========================  ===================================  ====================================
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Parts, Weighting, check_copied_parts
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.parts import copy_of_global_expert, expert_gradient, learning_rate, trained_parameters
from fedmoe_pl.algorithms.shared.personal_model import PersonalModel
from fedmoe_pl.checks import check_at_least, check_number
from fedmoe_pl.trees import Tree, inner_product, load_tree, mean_of_two, subtree, with_prefix


class PFedMe(PersonalModel):
    """Each client's ``theta`` minimizes its loss plus ``weight / 2 ||theta - w||^2``, and draws its ``w`` to itself.

    ``w`` is the module's ``global_expert``, which is averaged; ``theta`` is its ``local_expert``, which starts as a
    copy of the received ``w`` in every round. For each batch, ``theta`` takes ``inner_steps`` gradient steps, then
    ``w`` the step ``w - lr weight (w - theta)``, with the learning rate ``lr`` of the model's plain SGD. A client keeps
    its last ``theta``, which a phase with the gate ``LocalOnly`` evaluates; one that never took part uses the server's
    ``w``.
    ``w`` is never run: its running statistics of batch normalization stay as they were when the phase began, and
    clients that never took part use them. Those of ``theta`` go on from round to round, and are not averaged.

    Args:
        weight: lambda, the weight of the term.
        inner_steps: K, the number of steps of ``theta`` for each batch.
        inner_lr: learning rate of ``theta``; steps are stable if it is well below ``2 / weight``.
        decay: weight decay of ``theta`` in these steps.
        server_lr: beta, the server's step towards the mean.
        weighting: ``samples`` weighs a client's ``w`` by its number of training samples; ``uniform`` gives all clients
            the same weight.
    """

    parts = Parts(local_expert_predicts=True)  # a client's theta starts from the server's w: no copy of its own
    needs = (*PersonalModel.needs, "plain_steps", "step_of_each_batch", "whole_batches")

    def __init__(
        self,
        weight: float = 15.0,
        inner_steps: int = 5,
        inner_lr: float = 0.05,
        decay: float = 0.0,
        server_lr: float = 1.0,
        weighting: Weighting = "samples",
    ) -> None:
        for name, value in (("weight", weight), ("inner_lr", inner_lr), ("server_lr", server_lr)):
            check_number(self, name, value, above=0)
        check_at_least(self, "inner_steps", inner_steps, 1)
        check_number(self, "decay", decay, least=0)
        super().__init__(weighting)
        self.weight = weight
        self.inner_steps = inner_steps
        self.inner_lr = inner_lr
        self.decay = decay
        self.server_lr = server_lr

    def server_init(self, module: LightningModule) -> Tree:
        """``w``, and as the local expert the ``theta`` of clients that never take part.

        Refuses a module without two experts of one architecture, and optimizers other than plain SGD.
        """
        check_copied_parts(module, PersonalModel.parts.copied)
        learning_rate(self, module)
        return super().server_init(module) | copy_of_global_expert(module)

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Line 4: receives ``w``, the start of ``theta``, whose buffers are those that the client kept."""
        super().client_init(client, sent)
        start, parameters = copy_of_global_expert(client.module), dict(client.module.named_parameters())
        load_tree(client.module, {name: tensor for name, tensor in start.items() if name in parameters})
        rate = learning_rate(self, client.module)
        names = [*trained_parameters(client.module, "local_expert")]
        return {"names": names, "per_rate": 1 / rate if rate else 0.0}

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """Lines 6 and 7: a loss whose plain SGD step moves ``theta`` to its last inner step, and ``w`` towards it."""
        experts = module.get_submodule("global_expert"), module.get_submodule("local_expert")
        w, theta = (dict(expert.named_parameters()) for expert in experts)
        center = {name: w[name].detach() for name in constants["names"]}
        start = {name: theta[name].detach() for name in constants["names"]}
        kept, inner = 1 - self.inner_lr * (self.weight + self.decay), start
        pull = {name: self.inner_lr * self.weight * tensor for name, tensor in center.items()}
        for _ in range(self.inner_steps):
            gradient = expert_gradient(module, "local_expert", inner, batch)
            # inner - inner_lr (gradient + weight (inner - center) + decay inner), in two operations for each tensor
            inner = {
                name: torch.add(pull[name], tensor, alpha=kept).sub(gradient[name], alpha=self.inner_lr)
                for name, tensor in inner.items()
            }
        of_w = {name: self.weight * (center[name] - tensor) for name, tensor in inner.items()}
        of_theta = {name: constants["per_rate"] * (start[name] - tensor) for name, tensor in inner.items()}
        return torch.as_tensor(inner_product(of_w, w) + inner_product(of_theta, theta))

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """Line 10: ``(1 - server_lr) w + server_lr mean(w_i)``, also the ``theta`` of clients that never took part."""
        old = {name: server[name] for name in combined.sent}
        w = mean_of_two(old, 1 - self.server_lr, combined.sent, self.server_lr)
        w |= {name: tensor for name, tensor in combined.sent.items() if not tensor.is_floating_point()}
        return {**server, **w, **with_prefix(subtree(w, "global_expert."), "local_expert.")}
