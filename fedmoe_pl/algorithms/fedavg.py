"""FedAvg: McMahan et al., AISTATS 2017, Algorithm 1 (https://arxiv.org/abs/1602.05629)."""

from __future__ import annotations

from fedmoe_pl.algorithms.algorithm import Algorithm


class FedAvg(Algorithm):
    """Averages the shared parameters; each client keeps its others, as in FedPer and LG-FedAvg.

    Args:
        shared: glob patterns of the parameters and buffers that are averaged.
        trainable: glob patterns of the parameters that are trained.
        weighting: ``samples`` weighs a client by its number of training samples, as in FedAvg; ``uniform`` gives all
            clients the same weight, as in Eq. (1) and the code of PFL-MoE.

    Example:
        >>> FedAvg(shared="global_expert.*").is_shared("local_expert.classifier.0.weight")
        False
    """

    samples_in_loss_only = True
