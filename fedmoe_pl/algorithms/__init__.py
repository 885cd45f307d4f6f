"""Federated algorithms, one file per paper."""

from fedmoe_pl.algorithms.adaptive_experts import ClusterMixture, FineTunedCluster
from fedmoe_pl.algorithms.apfl import APFL
from fedmoe_pl.algorithms.ditto import Ditto
from fedmoe_pl.algorithms.fedavg import FedAvg
from fedmoe_pl.algorithms.fedbn import FedBN
from fedmoe_pl.algorithms.fedmoe_da import FedMoEDA
from fedmoe_pl.algorithms.fedprox import FedProx
from fedmoe_pl.algorithms.fedrep import FedRep
from fedmoe_pl.algorithms.ifca import EpsilonGreedyIFCA
from fedmoe_pl.algorithms.local import Local
from fedmoe_pl.algorithms.opt_out import OptInFedAvg, SpecialistMixture
from fedmoe_pl.algorithms.per_fedavg import PerFedAvg
from fedmoe_pl.algorithms.pfedme import PFedMe
from fedmoe_pl.algorithms.pfedmoe import PFedMoE
from fedmoe_pl.algorithms.pfl_moe import PersonalizedExpert, PFLMoE
from fedmoe_pl.algorithms.scaffold import Scaffold

__all__ = [
    "APFL",
    "ClusterMixture",
    "Ditto",
    "EpsilonGreedyIFCA",
    "FedAvg",
    "FedBN",
    "FedMoEDA",
    "FedProx",
    "FedRep",
    "FineTunedCluster",
    "Local",
    "OptInFedAvg",
    "PFLMoE",
    "PFedMe",
    "PFedMoE",
    "PerFedAvg",
    "PersonalizedExpert",
    "Scaffold",
    "SpecialistMixture",
]
