"""FedAvg: McMahan et al., AISTATS 2017, Algorithm 1 (https://arxiv.org/abs/1602.05629)."""

from __future__ import annotations

from typing import Any, Literal

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Client, Update


class FedAvg(Algorithm):
    """Averages the shared parameters; each client keeps its others, as in FedPer, LG-FedAvg and FedBN.

    Args:
        shared: glob patterns of the parameters and buffers that are averaged.
        trainable: glob patterns of the parameters that are trained.
        weighting: ``samples`` weighs a client by its number of training samples, as in FedAvg; ``uniform`` gives all
            clients the same weight, as in Eq. (1) and the code of PFL-MoE.

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
        super().__init__(shared, trainable)
        self.weighting = weighting

    def client_final(self, client: Client, const: dict[str, Any]) -> Update:
        """Weighs the update as ``weighting`` says."""
        update = super().client_final(client, const)
        return update if self.weighting == "samples" else Update(update.sent, 1, update.kept)
