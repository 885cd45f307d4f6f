"""FedProx: Li et al., MLSys 2020, Algorithm 2 (https://arxiv.org/abs/1812.06127)."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Client, Constants
from fedmoe_pl.checks import check_number
from fedmoe_pl.trees import Tree, squared_distance


class FedProx(Algorithm):
    """FedAvg with a proximal term ``mu / 2 ||w - w_t||^2`` in the local loss; ``w_t`` are the received parameters.

    Args:
        mu: weight of the term, at least 0, which is FedAvg.
        shared: glob patterns of the parameters and buffers that are averaged. The term is over these parameters.
    """

    def __init__(self, mu: float = 0.001, shared: str | list[str] = "*") -> None:
        check_number(self, "mu", mu, least=0)
        super().__init__(shared)
        self.mu = mu

    def client_init(self, client: Client, sent: Tree) -> Constants:
        """Loads the tensors; returns the received parameters for the loss."""
        super().client_init(client, sent)
        trained = [name for name, parameter in client.module.named_parameters() if parameter.requires_grad]
        return {"received": {name: sent[name] for name in trained if name in sent}}

    def client_loss(self, module: LightningModule, batch: Any, constants: Constants) -> Tensor:
        """The module's loss and the proximal term."""
        distance = squared_distance(constants["received"], dict(module.named_parameters()))
        return super().client_loss(module, batch, constants) + self.mu / 2 * distance
