"""Federated algorithms: one paper, one file."""

from fedmoe_pl.algorithms.adaptive_experts import ClusterMixture, FineTunedCluster
from fedmoe_pl.algorithms.fedavg import FedAvg
from fedmoe_pl.algorithms.ifca import EpsilonGreedyIFCA
from fedmoe_pl.algorithms.local import Local
from fedmoe_pl.algorithms.pfl_moe import PersonalizedExpert, PFLMoE

__all__ = [
    "ClusterMixture",
    "EpsilonGreedyIFCA",
    "FedAvg",
    "FineTunedCluster",
    "Local",
    "PFLMoE",
    "PersonalizedExpert",
]
