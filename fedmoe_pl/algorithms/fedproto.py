"""FedProto: Tan, Long, Liu, Zhou, Lu, Jiang, Zhang, AAAI 2022, Algorithm 1 (https://arxiv.org/abs/2105.00243).

The official code is at https://github.com/yuetan031/FedProto:

===================  =============================  ==============================  =============================
topic                paper                          official code                   here
===================  =============================  ==============================  =============================
clients' prototypes  mean over the client's         mean over the last epoch's      as in the paper: in one pass
                     samples                        batches, while training         in eval mode after training
server's mean        weighed by class counts        every client that has the       as in the code
                                                    class counts the same
distance             L2 norm of the difference of   mean squared error over the     as in the code
                     prototypes, class by class     batch and the features
prediction           nearest prototype              reports both                    ``prediction``
participation        all clients                    all clients                     ``clients_per_round``
===================  =============================  ==============================  =============================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Client, Constants, Update
from fedmoe_pl.algorithms.shared.class_means import (
    class_means,
    combine_class_means,
    loss_with_targets,
    problem_of_class_means,
    received_means,
    update_class_means,
)
from fedmoe_pl.algorithms.shared.parts import expert_prefix, split_expert
from fedmoe_pl.checks import check_choice, check_number
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models.inputs import call
from fedmoe_pl.trees import Tree, precise

Prediction = Literal["head", "prototype"]
_PROTOTYPES = "prototypes/"  # of every class, the mean of features (C, F); see class_means
_PENALTY = 100.0  # a class that cannot be predicted scores this much less than the best, so that losses stay finite


class FedProto(Algorithm):
    """Clients share only prototypes, the mean features of every class; their models may differ in architecture.

    The loss is cross-entropy plus ``weight`` times the mean squared error between the features and the global prototype
    of the label. Samples of a class without a prototype add 0, and so do all samples in the first round.

    Args:
        expert: name of the expert that is trained, such as ``local_expert``; empty for a module that is itself an
            ``extractor`` and a ``classifier``. The features of all clients must have the same width.
        weight: weight of the distance to the prototypes, at least 0, which is Local.
        prediction: ``head`` predicts with the module, so that the gate chooses the expert; ``prototype`` with the
            global prototype nearest to the features, among those of the client's own classes. A client that has none
            of these predicts with the module.
    """

    needs = ("classes", "fixed_gate")

    def __init__(self, expert: str = "global_expert", weight: float = 1.0, prediction: Prediction = "head") -> None:
        check_number(self, "weight", weight, least=0)
        check_choice(self, "prediction", prediction, get_args(Prediction))
        super().__init__(shared=[], trainable=f"{expert_prefix(expert)}*", weighting="uniform")
        self.expert = expert
        self.weight = weight
        self.prediction = prediction
        self.predictor = self._nearest_prototype if prediction == "prototype" else None

    def server_init(self, module: LightningModule) -> Tree:
        """Refuses an expert whose features cannot be computed."""
        split_expert(module, self.expert)
        return super().server_init(module)

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the client's own model; returns the global prototypes."""
        super().client_init(client, sent)
        prototypes, known = received_means(client, sent, _PROTOTYPES)
        return {"targets": prototypes, "known": known}

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """Cross-entropy and the weighted distance to the prototypes."""
        return loss_with_targets(module, self.expert, batch, constants, self.weight)

    def client_final(self, client: Client, constants: Constants) -> Update:
        """Sends the prototypes of its classes, keeps its model."""
        update = super().client_final(client, constants)
        prototypes = class_means(client, self._features, _PROTOTYPES, per_client=True)
        return Update(prototypes, update.weight, update.state)

    def problem_of_update(
        self, client_id: int, update: Update, initial: Tree, datamodule: FederatedDataModule, round: int
    ) -> str:
        """The prototypes, each of one client."""
        return problem_of_class_means(update.sent, _PROTOTYPES, datamodule.num_classes, 1)

    def combine(self, a: Update, b: Update) -> Update:
        """The mean prototypes over the clients that have the class."""
        return Update(combine_class_means(a.sent, b.sent, _PROTOTYPES), a.weight + b.weight)

    def server_update(self, server: Tree, combined: Update) -> Tree:
        """The round's prototypes; a class that no client of the round has keeps its earlier one."""
        return update_class_means(server, combined.sent, _PROTOTYPES)

    def _nearest_prototype(self, client: Client, server: Tree) -> Callable[[Tensor], Tensor]:
        """The nearest prototype of the client's own classes: scores are negative distances."""
        module, labels = client.module, client.datamodule.y[client.samples]
        prototypes, known = received_means(client, server, _PROTOTYPES)
        usable = known & (torch.bincount(labels, minlength=len(known)) > 0)
        if not usable.any():
            return module

        def predict(x: Tensor) -> Tensor:
            features = self._features(module, x).flatten(1)  # of any inputs, also a dict, which has no device
            scores = -torch.cdist(precise(features), precise(prototypes.to(features.device)))
            own_classes = usable.to(features.device)
            highest = scores.masked_fill(~own_classes, -torch.inf).amax(1, keepdim=True)
            return torch.where(own_classes, scores, highest - _PENALTY)

        return predict

    def _features(self, module: LightningModule, x: Tensor) -> Tensor:
        return call(split_expert(module, self.expert)[0], x)
