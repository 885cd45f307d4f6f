"""Per-FedAvg: Fallah, Mokhtari, Ozdaglar, NeurIPS 2020, Algorithm 1 (https://arxiv.org/abs/2002.07948).

============  ============================  ====================================  ======================================
topic         paper                         authors of pFedMe (CharlieDinh)       here
============  ============================  ====================================  ======================================
weights of    uniform                       numbers of samples                    ``weighting="uniform"``
clients
batches       D, D' and D'' are separate    two batches in turn                   the first half of each batch is D, the
                                                                                  second one D'
second order  Hessian at D'', or by finite  none                                  ``second_order``: exactly, at D
              differences
evaluation    one step of alpha             two steps on labelled test samples    one step of alpha on all training
                                                                                  samples
============  ============================  ====================================  ======================================
"""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Parts, Weighting
from fedmoe_pl.algorithms.client import Client, Constants
from fedmoe_pl.algorithms.shared.parts import (
    expert_gradient,
    expert_loss,
    expert_prefix,
    logits_loss,
    pair_of,
    trained_parameters,
    training_gradient,
)
from fedmoe_pl.checks import check_number
from fedmoe_pl.models.inputs import call, rows_of
from fedmoe_pl.models.layers import has_batch_norm
from fedmoe_pl.trees import Tree, with_prefix


class PerFedAvg(Algorithm):
    """FedAvg of a model that is good after one gradient step on a client's data: ``f(w - inner_lr df(w; D); D')``.

    The first half of every batch is D, the rest D'. If D has no sample, or a single one with batch
    normalization, the inner step is left out. What a client uses is the server's model after one step on all of its
    training samples, without augmentation and dropout; nothing is kept. Only the expert is shared and trained.

    Args:
        inner_lr: alpha, the size of the inner step, at least 0, which is FedAvg on D'.
        second_order: whether the inner gradient is differentiated, too. Otherwise it is a constant, as in the paper's
            first-order version (FO).
        expert: name of the expert in the module; empty for the module itself.
        weighting: how the average weighs clients, as in :class:`~fedmoe_pl.algorithms.FedAvg`.
    """

    needs = ("loss_of_outputs", "whole_batches", "fixed_gate")

    def __init__(
        self,
        inner_lr: float = 0.01,
        second_order: bool = False,
        expert: str = "global_expert",
        weighting: Weighting = "uniform",
    ) -> None:
        check_number(self, "inner_lr", inner_lr, least=0)
        self.prefix = expert_prefix(expert)
        super().__init__(f"{self.prefix}*", f"{self.prefix}*", weighting)
        self.inner_lr = inner_lr
        self.second_order = second_order
        self.expert = expert
        self.parts = Parts(computed=(expert.split(".")[0],))

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the tensors; returns the names of the parameters that take the inner step."""
        super().client_init(client, sent)
        return {"names": [*trained_parameters(client.module, self.expert)]}

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """Lines 6 to 8: the loss on D' after an inner step on D."""
        (x, y), part = pair_of(module, batch), module.get_submodule(self.expert)
        half = len(y) // 2
        if half < (2 if has_batch_norm(part) else 1):
            return expert_loss(module, self.expert, batch)
        named: Tree = dict(part.named_parameters())
        w = {name: named[name] for name in constants["names"]}
        gradient = expert_gradient(module, self.expert, w, (rows_of(x, slice(half)), y[:half]))
        if not self.second_order:
            gradient = {name: tensor.detach() for name, tensor in gradient.items()}
        stepped = {name: tensor - self.inner_lr * gradient[name] for name, tensor in w.items()}
        return logits_loss(module, call(part, rows_of(x, slice(half, None)), stepped), y[half:])

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """The server's model after one step on the client's training samples."""
        tensors = super().personal_tensors(client, server)
        gradient = with_prefix(training_gradient(client, self.expert, tensors), self.prefix)
        return tensors | {name: tensors[name] - self.inner_lr * tensor for name, tensor in gradient.items()}
