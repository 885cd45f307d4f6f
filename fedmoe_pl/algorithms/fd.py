"""FD, federated distillation: Jeong, Oh, Kim, Park, Bennis, Kim 2018, Algorithm 1 (https://arxiv.org/abs/1811.11479).

No code by the authors is known. HtFLlib's implementation, from the authors of PFLlib, was read:

==================  ===========================  ===============================  ====================================
topic               paper                        HtFLlib                          here
==================  ===========================  ===============================  ====================================
vectors             softmax outputs              logits                           ``outputs``, softmax by default
collected           while training, over all     as in the paper                  in one pass in eval mode after
                    samples of the round                                          training
a client's target   the mean of the others       the mean of all clients, with    the mean of the others
                                                 itself
distance            cross-entropy                cross-entropy with the mean      cross-entropy of softmax outputs, or
                                                 logits as probabilities, which   squared error of logits
                                                 has no lower bound
==================  ===========================  ===============================  ====================================
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Messages
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.class_means import (
    class_means,
    combine_class_means,
    mean_of_known,
    problem_of_class_means,
    received_means,
    rows_of_labels,
)
from fedmoe_pl.algorithms.shared.parts import expert_prefix, logits_loss, pair_of
from fedmoe_pl.checks import check_choice, check_number
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models.inputs import call
from fedmoe_pl.trees import Tree, precise, subtree, with_prefix

Outputs = Literal["probabilities", "logits"]
_OUTPUTS = "outputs/"  # of every class, the mean output (C, C) and the number of clients that have the class, (C,)
_OWN = "own/"  # the same that a client sent last
_SENDERS = "senders/"  # prefix of the id of a client whose outputs are in the server's means; tensors of no size
_INCLUDED = "outputs/included"  # tells a client whether its own outputs are in the means, shape ()


class FD(Algorithm):
    """Clients share only their mean outputs on each class; their models may differ in architecture.

    The loss is cross-entropy plus ``weight`` times the distance from the outputs to the mean outputs of the other
    clients on the label's class. Samples of a class that no other client of the last round has add 0, and so do all
    samples in the first round.

    Args:
        expert: name of the expert that is trained, such as ``local_expert``; empty for the module itself.
        weight: weight of the distance, at least 0, which is Local.
        outputs: ``probabilities`` shares softmax outputs, and the distance is the cross-entropy with them as targets;
            ``logits`` shares logits, and the distance is the mean squared error.
    """

    needs = ("classes", "fixed_gate")
    messages = Messages(per_client=(_SENDERS,))

    def __init__(self, expert: str = "global_expert", weight: float = 0.1, outputs: Outputs = "probabilities") -> None:
        check_number(self, "weight", weight, least=0)
        check_choice(self, "outputs", outputs, get_args(Outputs))
        super().__init__(shared=[], trainable=f"{expert_prefix(expert)}*", weighting="uniform")
        self.expert = expert
        self.weight = weight
        self.outputs = outputs

    def server_send(self, server: Tree, client_id: int, request: Tree) -> Tree:
        """The mean outputs, and whether the client's own are among them; nothing in the first round."""
        means = {name: tensor for name, tensor in server.items() if name.startswith(_OUTPUTS)}
        return means and {**means, _INCLUDED: torch.tensor(f"{_SENDERS}{client_id}" in server)}

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the client's own model; returns the mean outputs of the other clients."""
        super().client_init(client, sent)
        targets, known = received_means(client, sent, _OUTPUTS)
        if sent.get(_INCLUDED):
            previous = subtree(client.state, _OWN)
            count = sent[f"{_OUTPUTS}count"]
            others = count - previous["count"]
            known = others > 0
            total = targets * count[:, None] - previous["mean"] * previous["count"][:, None]
            targets = total / others.clamp(min=1)[:, None]
        return {"targets": targets, "known": known}

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """Cross-entropy and the weighted distance to the targets."""
        x, y = pair_of(module, batch)
        logits = precise(call(module.get_submodule(self.expert), x))
        targets = rows_of_labels(constants["targets"], y)
        if self.outputs == "probabilities":
            distances = -(targets * logits.log_softmax(1)).sum(1)
        else:
            distances = (logits - targets).square().mean(1)
        return logits_loss(module, logits, y) + self.weight * mean_of_known(distances, y, constants["known"])

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Sends the mean outputs of its classes, and keeps them with its model."""
        update = super().client_final(client, constants)
        outputs = class_means(client, self._outputs, _OUTPUTS, per_client=True)
        remembered = with_prefix(subtree(outputs, _OUTPUTS), _OWN)
        sender = {f"{_SENDERS}{client.id}": torch.empty(0)}  # the server knows who sent
        return Update(outputs | sender, update.weight, update.state | remembered)

    def problem_of_update(
        self, client_id: int, update: Update, initial: Tree, datamodule: FederatedDataModule, round: int
    ) -> str:
        """The mean outputs, each of one client, and the sender."""
        sender = {f"{_SENDERS}{client_id}": (0,)}
        return problem_of_class_means(update.sent, _OUTPUTS, datamodule.num_classes, 1, sender)

    def combine(self, a: Update, b: Update) -> Update:
        """The mean outputs over the clients that have the class, and all senders."""
        return Update({**a.sent, **b.sent, **combine_class_means(a.sent, b.sent, _OUTPUTS)}, a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """The round's mean outputs; those of earlier rounds are forgotten."""
        return combined.sent

    def _outputs(self, module: LightningModule, x: Tensor) -> Tensor:
        logits = precise(call(module.get_submodule(self.expert), x))
        return logits.softmax(1) if self.outputs == "probabilities" else logits
