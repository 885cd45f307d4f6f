"""Federated algorithms: one paper, one file."""

from fedmoe_pl.algorithms.fedavg import FedAvg
from fedmoe_pl.algorithms.local import Local
from fedmoe_pl.algorithms.opt_out import OptInFedAvg, SpecialistMixture
from fedmoe_pl.algorithms.pfl_moe import PersonalizedExpert, PFLMoE

__all__ = ["FedAvg", "Local", "OptInFedAvg", "PFLMoE", "PersonalizedExpert", "SpecialistMixture"]
