"""FedAPEN: Qin et al., KDD 2023 (https://doi.org/10.1145/3580305.3599344), as in its official code.

=====================  ==============================================  =============================================
topic                  official code                                   here
=====================  ==============================================  =============================================
adaptability set       the last 5 % of a client's training samples     5 % of them, drawn once, but at least one;
                                                                       the same in every round; a client with
                                                                       a single sample sets none aside, and keeps
                                                                       its w of 0.5
its batches            shuffled in every epoch                         always in the same order
w                      is learned by all clients in every round        is learned when a client next trains, and when
                                                                       it is evaluated, which keeps nothing
learning rate          0.01 * 0.99^t in round t                        the phase's ``train.round_lr_scheduler``
=====================  ==============================================  =============================================
"""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.func import grad

from fedmoe_pl.algorithms.algorithm import Algorithm, Parts, Weighting
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.parts import (
    both_logits,
    check_mixing,
    distillation_loss,
    evaluation_copy,
    logits_loss,
    pair_of,
    pairs_of,
    set_aside,
)
from fedmoe_pl.checks import InvalidArgumentError, check_at_least, check_number
from fedmoe_pl.models import MixtureWeights
from fedmoe_pl.trees import Tree, load_tree

_ADAPTABILITY = 8  # separates this share of a client's samples from other shares of them
_WEIGHTS = "gate.weights"


class FedAPEN(Algorithm):
    """A private and a shared model teach each other and predict as an ensemble with a weight that each client learns.

    The private model is ``local_expert``, which may be of another architecture, also from client to client; the shared
    one is ``global_expert``. The ensemble has the logits ``w z_p + (1 - w) z_s``; the gate is a ``MixtureWeights``,
    whose ``weights`` are 1 - w and w. Both models learn from the labels, from each other, and from the ensemble's
    errors. A client that has trained before learns ``w`` with each new shared model, on samples that it has set aside.

    Args:
        adaptability_fraction: share of a client's training samples, above 0 and below 1, with which it learns ``w``.
        weight_lr: learning rate of ``w``, at least 0, which keeps the weights equal.
        weight_epochs: passes, at least one, over the samples set aside, in batches of the data module's size.
        shared: glob patterns of the parameters and buffers that are averaged.
        weighting: how the average weighs clients, as in :class:`~fedmoe_pl.algorithms.FedAvg`.
    """

    needs = ("classes",)
    parts = Parts(computed=("gate",))

    def __init__(
        self,
        adaptability_fraction: float = 0.05,
        weight_lr: float = 0.001,
        weight_epochs: int = 10,
        shared: str | list[str] = "global_expert.*",
        weighting: Weighting = "uniform",
    ) -> None:
        check_number(self, "adaptability_fraction", adaptability_fraction, above=0, below=1)
        check_number(self, "weight_lr", weight_lr, least=0)
        check_at_least(self, "weight_epochs", weight_epochs, 1)
        super().__init__(shared, ["global_expert.*", "local_expert.*"], weighting)
        self.adaptability_fraction = adaptability_fraction
        self.weight_lr = weight_lr
        self.weight_epochs = weight_epochs

    def server_init(self, module: LightningModule) -> Tree:
        """The shared model; refuses mixtures whose logits have no such weights."""
        if not isinstance(gate := getattr(module, "gate", None), MixtureWeights):
            raise InvalidArgumentError(module, "gate", gate, "MixtureWeights, which has each client's weights")
        check_mixing(self, module, "logits")
        return super().server_init(module)

    def client_samples(self, client: Client) -> Tensor:
        """All samples but those that are set aside."""
        return set_aside(client, self.adaptability_fraction, _ADAPTABILITY)[1]

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the tensors, and learns the weights for the shared model that was sent."""
        constants = super().client_init(client, sent)
        load_tree(client.module, self._learned(client, client.module.state_dict()))
        return constants

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """The sum of both models' losses; their gradients do not interact."""
        x, y = pair_of(module, batch)
        private, shared = both_logits(module, x)
        shared_weight, weight = module.get_buffer(_WEIGHTS)
        loss = torch.zeros_like(weight)
        for logits, weight_of_logits, teacher, weight_of_teacher in (
            (private, weight, shared.detach(), shared_weight),
            (shared, shared_weight, private.detach(), weight),
        ):
            ensemble = weight_of_logits * logits + weight_of_teacher * teacher
            loss = loss + logits_loss(module, logits, y) + distillation_loss(logits, teacher, y)
            loss = loss + logits_loss(module, ensemble, y)
        return loss

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Sends the shared model; keeps the private one and the weights."""
        update = super().client_final(client, constants)
        update.state[_WEIGHTS] = client.module.get_buffer(_WEIGHTS).cpu().clone()
        return update

    def personal_tensors(self, client: Client, server: Tree) -> Tree:
        """Both models, and the weights that the client learns for them."""
        tensors = super().personal_tensors(client, server)
        return {**tensors, **self._learned(client, tensors)}

    def _learned(self, client: Client, tensors: Tree) -> Tree:
        """The weights after SGD on the ensemble's loss with constant models; none before the first training."""
        if _WEIGHTS not in client.state:
            return {}
        samples, _ = set_aside(client, self.adaptability_fraction, _ADAPTABILITY)
        batches = client.datamodule.batches(samples, device=torch.device("cpu"))
        with torch.inference_mode(False), torch.no_grad():  # clients are evaluated without gradients
            module = evaluation_copy(client, batches)
            load_tree(module, tensors)
            outputs = [(*both_logits(module, x), y) for x, y in pairs_of(module, batches)]

            def loss(weight: Tensor, private: Tensor, shared: Tensor, y: Tensor) -> Tensor:
                return logits_loss(module, weight * private + (1 - weight) * shared, y)

            weight = module.get_buffer(_WEIGHTS)[1]
            for private, shared, y in outputs * self.weight_epochs:
                weight = (weight - self.weight_lr * grad(loss)(weight, private, shared, y)).clamp(0, 1)
            return {_WEIGHTS: torch.stack((1 - weight, weight))}
