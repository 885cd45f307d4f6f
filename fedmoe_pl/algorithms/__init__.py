"""Federated algorithms, one file per paper."""

from fedmoe_pl.algorithms.adaptive_experts import ClusterMixture, FineTunedCluster
from fedmoe_pl.algorithms.apfl import APFL
from fedmoe_pl.algorithms.comigs import CoMiGS
from fedmoe_pl.algorithms.ditto import Ditto
from fedmoe_pl.algorithms.fd import FD
from fedmoe_pl.algorithms.fedala import FedALA
from fedmoe_pl.algorithms.fedalt import FedALT
from fedmoe_pl.algorithms.fedapen import FedAPEN
from fedmoe_pl.algorithms.fedavg import FedAvg
from fedmoe_pl.algorithms.fedbn import FedBN
from fedmoe_pl.algorithms.feddpa import FedDPA
from fedmoe_pl.algorithms.fedem import FedEM
from fedmoe_pl.algorithms.fedex_lora import FedExLoRA
from fedmoe_pl.algorithms.fedjets import FedJETs
from fedmoe_pl.algorithms.fedkd import FedKD
from fedmoe_pl.algorithms.fedlease import FedLEASE
from fedmoe_pl.algorithms.fedmix import FedMix
from fedmoe_pl.algorithms.fedmoe_da import FedMoEDA
from fedmoe_pl.algorithms.fedpac import FedPAC
from fedmoe_pl.algorithms.fedproto import FedProto
from fedmoe_pl.algorithms.fedprox import FedProx
from fedmoe_pl.algorithms.fedrep import FedRep
from fedmoe_pl.algorithms.fedrod import FedRoD
from fedmoe_pl.algorithms.flexlora import FlexLoRA
from fedmoe_pl.algorithms.fml import FML
from fedmoe_pl.algorithms.hetlora import HetLoRA
from fedmoe_pl.algorithms.ifca import EpsilonGreedyIFCA
from fedmoe_pl.algorithms.knn_per import KNNPer
from fedmoe_pl.algorithms.label_prior import LabelPrior
from fedmoe_pl.algorithms.local import Local
from fedmoe_pl.algorithms.opt_out import OptInFedAvg, SpecialistMixture
from fedmoe_pl.algorithms.per_fedavg import PerFedAvg
from fedmoe_pl.algorithms.pfedme import PFedMe
from fedmoe_pl.algorithms.pfedmm import PFedMM
from fedmoe_pl.algorithms.pfedmoe import PFedMoE
from fedmoe_pl.algorithms.pfl_moe import FineTuning, PFLMoE
from fedmoe_pl.algorithms.pm_moe import PMMoE
from fedmoe_pl.algorithms.scaffold import Scaffold
from fedmoe_pl.algorithms.server_optimizers import FedAdagrad, FedAdam, FedYogi

__all__ = [
    "APFL",
    "FD",
    "FML",
    "ClusterMixture",
    "CoMiGS",
    "Ditto",
    "EpsilonGreedyIFCA",
    "FedALA",
    "FedALT",
    "FedAPEN",
    "FedAdagrad",
    "FedAdam",
    "FedAvg",
    "FedBN",
    "FedDPA",
    "FedEM",
    "FedExLoRA",
    "FedJETs",
    "FedKD",
    "FedLEASE",
    "FedMix",
    "FedMoEDA",
    "FedPAC",
    "FedProto",
    "FedProx",
    "FedRep",
    "FedRoD",
    "FedYogi",
    "FineTunedCluster",
    "FineTuning",
    "FlexLoRA",
    "HetLoRA",
    "KNNPer",
    "LabelPrior",
    "Local",
    "OptInFedAvg",
    "PFLMoE",
    "PFedMM",
    "PFedMe",
    "PFedMoE",
    "PMMoE",
    "PerFedAvg",
    "Scaffold",
    "SpecialistMixture",
]
