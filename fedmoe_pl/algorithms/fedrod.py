"""FedRoD: Chen, Chao, ICLR 2022, Algorithm 1 with a linear personal head (https://arxiv.org/abs/2107.00778).

The authors' repository has no code. PFLlib's implementation was read:

==================  ==============================  ==================================================================
topic               PFLlib                          here
==================  ==============================  ==================================================================
n_c                 without the last short batch    all training samples of the client
the two steps       one after the other, both from  one step on the sum of both losses, which is the same for
                    the same forward pass           optimizers that work element by element
initial head        a copy of the initial generic   a copy of the generic head that the client first receives, the
                    head                            same in the first round, or has from an earlier phase
evaluated           the personal prediction         the gate chooses: ``EqualWeights`` for the personal prediction,
                                                    ``GlobalOnly`` for the generic one
==================  ==============================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Parts
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.parts import check_mixing, logits_loss, pair_of, split_expert
from fedmoe_pl.checks import check_number
from fedmoe_pl.models.inputs import call
from fedmoe_pl.trees import Tree, load_tree, subtree, with_prefix

_GENERIC, _PERSONAL = "global_expert.", "local_expert."
_HEAD = "local_expert.classifier."


class FedRoD(Algorithm):
    """One extractor with two heads: a generic one for balanced classes, and a personal one for the client's own.

    The global expert, an extractor and the generic head h_G, is averaged. Its loss is the balanced softmax: the
    cross-entropy of ``h_G(z) + prior_exponent * log n_c`` for features z and the client's n_c samples of class c. The
    personal head h_P, the local expert's classifier, never leaves its client. Its loss is the cross-entropy of
    ``h_G(z) + h_P(z)``, which trains only h_P. A ``loss`` of the model takes the place of both cross-entropies.

    A client's local expert has the global expert's extractor. Therefore a gate with ``EqualWeights`` predicts the class
    with the largest ``h_G(z) + h_P(z)``, and ``GlobalOnly`` that with the largest ``h_G(z)``. The mixture has half the
    sum as its logits, and the loss of these is the ``validation_loss`` by which ``select`` may choose a round.

    Args:
        prior_exponent: exponent of the class counts n_c, at least 0, which trains the global expert as FedAvg does.
    """

    parts = Parts(copied={"local_expert": "global_expert"})
    needs = ("classes", "fixed_gate")

    def __init__(self, prior_exponent: float = 1.0) -> None:
        check_number(self, "prior_exponent", prior_exponent, least=0)
        super().__init__(shared=f"{_GENERIC}*", trainable=[f"{_GENERIC}*", f"{_HEAD}*"])
        self.prior_exponent = prior_exponent

    def server_init(self, module: LightningModule) -> Tree:
        """The global expert: clients go on with the heads that they have from an earlier phase.

        Refuses a mixture that adds no logits.
        """
        check_mixing(self, module, "logits")
        return {name: tensor for name, tensor in super().server_init(module).items() if self.is_shared(name)}

    def server_begin(self, server: Tree, clients: Iterable[Client]) -> Tree:
        """Adds the local expert of a client without a head of its own, for phases that start from this one."""
        return {**server, **_local_expert(server, {})}

    def server_send(self, server: Tree, client_id: int, request: Tree) -> Tree:
        """The global expert, of which clients make such a local expert themselves."""
        return {name: tensor for name, tensor in server.items() if not name.startswith(_PERSONAL)}

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the shared parts and the client's own head; returns the class counts, (C,)."""
        super().client_init(client, sent)
        load_tree(client.module, _local_expert(client.module.state_dict(), client.state))
        labels = client.datamodule.y[client.samples]
        counts = torch.bincount(labels[labels >= 0], minlength=client.datamodule.num_classes)
        return {"counts": counts.to(next(client.module.parameters()).dtype)}

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """The sum of the generic and the personal loss."""
        x, y = pair_of(module, batch)
        extractor, generic_head = split_expert(module, "global_expert")
        features = call(extractor, x)
        logits = generic_head(features)
        personal = logits.detach() + split_expert(module, "local_expert")[1](features.detach())
        counts = constants["counts"]
        counts = F.pad(counts, (0, logits.shape[1] - len(counts)))  # the model may know more classes
        log_prior = counts.pow(self.prior_exponent).log()
        return logits_loss(module, logits + log_prior, y) + logits_loss(module, personal, y)

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Sends the global expert, keeps the personal head."""
        state = client.module.state_dict()
        head = {name: tensor.detach().cpu().clone() for name, tensor in state.items() if name.startswith(_HEAD)}
        load_tree(client.module, _local_expert(state, head))
        update = super().client_final(client, constants)
        others = {name: tensor for name, tensor in update.state.items() if not name.startswith(_PERSONAL)}
        return Update(update.sent, update.weight, others | head)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """The mean global expert, and the local expert of a client without a head of its own."""
        return {**super().server_update(server, combined), **_local_expert(combined.sent, {})}

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """The server's global expert; a local expert with its extractor and the client's own head."""
        tensors = super().personal_tensors(client, server)
        return {**tensors, **_local_expert(tensors, client.state)}


def _local_expert(tensors: Tree, kept: Tree) -> Tree:
    """The local expert's tensors: a copy of the global expert's, but the head that the client kept, if it kept one."""
    copied = with_prefix(subtree(tensors, _GENERIC), _PERSONAL)
    return copied | {name: tensor for name, tensor in kept.items() if name.startswith(_HEAD)}
