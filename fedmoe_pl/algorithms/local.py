"""Local training, also called Standalone: a baseline of all papers here but FedMoE-DA."""

from __future__ import annotations

from fedmoe_pl.algorithms.algorithm import Algorithm


class Local(Algorithm):
    """Every client trains alone, from the same initial model, and keeps its result.

    Args:
        trainable: glob patterns of the parameters that are trained.
    """

    federated = False
    samples_in_loss_only = True

    def __init__(self, trainable: str | list[str] = "*") -> None:
        super().__init__(trainable=trainable)
