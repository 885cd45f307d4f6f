"""Local (Standalone): every client trains alone; the baseline of all five papers (METHODS section 8)."""

from __future__ import annotations

from lightning.pytorch import LightningModule

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.trees import Patterns


class Local(Algorithm):
    """Nothing is shared: every client trains from the same initial model, and keeps the result.

    Args:
        trainable: glob patterns of the parameters that are trained.
    """

    federated = False

    def __init__(self, trainable: str | list[str] = "*") -> None:
        self.trainable = Patterns(trainable)

    def check(self, module: LightningModule) -> None:
        """Refuses patterns that match nothing."""
        self.trainable.check(module.state_dict(), "algorithm.init_args.trainable")

    def is_trainable(self, name: str, round: int, epoch: int) -> bool:
        """Whether ``trainable`` matches the name."""
        return name in self.trainable
