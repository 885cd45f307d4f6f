"""FedProx: Li et al., MLSys 2020, Algorithm 2 (https://arxiv.org/abs/1812.06127); METHODS section 8."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.algorithm import Algorithm, Client
from fedmoe_pl.trees import Patterns, Tree


class FedProx(Algorithm):
    """FedAvg whose clients are drawn to what they received: the local loss has a term ``mu / 2 ||w - w_t||^2``.

    Args:
        mu: weight of the term; 0 is FedAvg.
        shared: glob patterns of the parameters and buffers that are averaged, and whose parameters the term draws.

    Raises:
        MisconfigurationException: if ``mu`` is below 0.
    """

    def __init__(self, mu: float = 0.001, shared: str | list[str] = "*") -> None:
        if not mu >= 0:
            raise MisconfigurationException(f"algorithm.init_args.mu is {mu}, but must be at least 0.")
        self.mu = mu
        self.shared = Patterns(shared)

    def check(self, module: LightningModule) -> None:
        """Refuses patterns that match nothing."""
        self.shared.check(module.state_dict(), "algorithm.init_args.shared")

    def is_shared(self, name: str) -> bool:
        """Whether ``shared`` matches the name."""
        return name in self.shared

    def client_init(self, client: Client, sent: Tree) -> dict[str, Any]:
        """Loads, and hands the received parameters to the loss."""
        super().client_init(client, sent)
        parameters = dict(client.module.named_parameters())
        return {"received": {name: tensor for name, tensor in sent.items() if name in parameters}}

    def client_loss(
        self, module: LightningModule, batch: Any, const: dict[str, Any]
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The module's loss and the proximal term."""
        loss, metrics = super().client_loss(module, batch, const)
        parameters = dict(module.named_parameters())
        distances = [((parameters[name] - tensor.to(loss)) ** 2).sum() for name, tensor in const["received"].items()]
        return loss + self.mu / 2 * sum(distances), metrics
