"""Federated algorithms: one paper, one file."""

from fedmoe_pl.algorithms.fedavg import FedAvg
from fedmoe_pl.algorithms.local import Local
from fedmoe_pl.algorithms.pfedmoe import PFedMoE
from fedmoe_pl.algorithms.pfl_moe import PersonalizedExpert, PFLMoE

__all__ = ["FedAvg", "Local", "PFLMoE", "PFedMoE", "PersonalizedExpert"]
