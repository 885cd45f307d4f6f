"""FedAvg: McMahan et al., AISTATS 2017, Algorithm 1 (https://arxiv.org/abs/1602.05629)."""

from __future__ import annotations

from typing import Any, Literal, get_args

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Client, Update

Weighting = Literal["samples", "uniform"]


def check_weighting(algorithm: Algorithm, weighting: str) -> None:
    """Refuses an unknown weighting, which would count as uniform.

    Raises:
        MisconfigurationException: if it is neither ``samples`` nor ``uniform``.
    """
    if weighting not in get_args(Weighting):
        raise MisconfigurationException(
            f"{type(algorithm).__name__}: weighting is '{weighting}', but must be samples or uniform."
        )


def weighted(update: Update, weighting: Weighting) -> Update:
    """A client's update, whose weight is its number of samples, with the weight that ``weighting`` gives it."""
    return update if weighting == "samples" else Update(update.sent, 1, update.kept)


class FedAvg(Algorithm):
    """Averages the shared parameters; each client keeps its others, as in FedPer and LG-FedAvg.

    Args:
        shared: glob patterns of the parameters and buffers that are averaged.
        trainable: glob patterns of the parameters that are trained.
        weighting: ``samples`` weighs a client by its number of training samples, as in FedAvg; ``uniform`` gives all
            clients the same weight, as in Eq. (1) and the code of PFL-MoE.

    Raises:
        MisconfigurationException: if ``weighting`` is neither of these.

    Example:
        >>> FedAvg(shared="global_expert.*").is_shared("local_expert.classifier.0.weight")
        False
    """

    def __init__(
        self,
        shared: str | list[str] = "*",
        trainable: str | list[str] = "*",
        weighting: Weighting = "samples",
    ) -> None:
        check_weighting(self, weighting)
        super().__init__(shared, trainable)
        self.weighting: Weighting = weighting

    def client_final(self, client: Client, const: dict[str, Any]) -> Update:
        """Weighs the update as ``weighting`` says."""
        return weighted(super().client_final(client, const), self.weighting)
