"""FedAvg: McMahan et al., AISTATS 2017, Algorithm 1 (https://arxiv.org/abs/1602.05629)."""

from __future__ import annotations

from typing import Any, Literal

from lightning.pytorch import LightningModule

from fedmoe_pl.algorithms.algorithm import Algorithm, Client, Update
from fedmoe_pl.trees import Patterns


class FedAvg(Algorithm):
    """Federated averaging of the shared parameters; the others stay on their client (FedPer, LG-FedAvg, FedBN).

    Args:
        shared: glob patterns of the parameters and buffers that are averaged.
        trainable: glob patterns of the parameters that are trained.
        weighting: ``samples`` weighs a client by its number of training samples, as FedAvg does; ``uniform`` weighs
            all alike, as PFL-MoE's Eq. (1) and code do (METHODS section 2).

    Example:
        >>> FedAvg(shared="global_expert.*").is_shared("local_expert.classifier.0.weight")
        False
    """

    def __init__(
        self,
        shared: str | list[str] = "*",
        trainable: str | list[str] = "*",
        weighting: Literal["samples", "uniform"] = "samples",
    ) -> None:
        self.shared = Patterns(shared)
        self.trainable = Patterns(trainable)
        self.weighting = weighting

    def check(self, module: LightningModule) -> None:
        """Refuses patterns that match nothing."""
        self.shared.check(module.state_dict(), "algorithm.init_args.shared")
        self.trainable.check(module.state_dict(), "algorithm.init_args.trainable")

    def is_shared(self, name: str) -> bool:
        """Whether ``shared`` matches the name."""
        return name in self.shared

    def is_trainable(self, name: str, round: int, epoch: int) -> bool:
        """Whether ``trainable`` matches the name."""
        return name in self.trainable

    def client_final(self, client: Client, const: dict[str, Any]) -> Update:
        """Weighs the update as configured."""
        update = super().client_final(client, const)
        return update if self.weighting == "samples" else Update(update.sent, 1, update.kept)
