"""Mixtures of experts, gates and experts; they do not depend on the federation."""

from fedmoe_pl.models.experts.adaptive import IFCACNN, LEAFCNN
from fedmoe_pl.models.experts.fedmoe_da import ConvBlock, ConvExpert, FedAvgCNN
from fedmoe_pl.models.experts.opt_out import BiLSTM, TwoConvCNN
from fedmoe_pl.models.experts.pfedmoe import CNN
from fedmoe_pl.models.experts.pfl_moe import VGG16, LeNet5
from fedmoe_pl.models.experts.small import RepresentationMLP, SmallFCN, SmallMLP
from fedmoe_pl.models.gates.fixed import ConstantGate, EqualWeights, FixedGate, GlobalOnly, LocalOnly, MixtureWeights
from fedmoe_pl.models.gates.gate import Gate
from fedmoe_pl.models.gates.linear import FeatureGate, LinearGate, ProxyGate
from fedmoe_pl.models.gates.network import GateCNN, MLPGate, NetworkGate, SwitchNormGate
from fedmoe_pl.models.mixtures.clustered import ClusteredMoE
from fedmoe_pl.models.mixtures.mixture import MixtureOfExperts
from fedmoe_pl.models.mixtures.personalized import PersonalizedMoE
from fedmoe_pl.models.mixtures.pooled import PooledMoE
from fedmoe_pl.models.mixtures.representation import RepresentationMoE
from fedmoe_pl.models.mixtures.sparse import SparseMoE
from fedmoe_pl.models.normalization import SwitchNorm1d

__all__ = [
    "CNN",
    "IFCACNN",
    "LEAFCNN",
    "VGG16",
    "BiLSTM",
    "ClusteredMoE",
    "ConstantGate",
    "ConvBlock",
    "ConvExpert",
    "EqualWeights",
    "FeatureGate",
    "FedAvgCNN",
    "FixedGate",
    "Gate",
    "GateCNN",
    "GlobalOnly",
    "LeNet5",
    "LinearGate",
    "LocalOnly",
    "MLPGate",
    "MixtureOfExperts",
    "MixtureWeights",
    "NetworkGate",
    "PersonalizedMoE",
    "PooledMoE",
    "ProxyGate",
    "RepresentationMLP",
    "RepresentationMoE",
    "SmallFCN",
    "SmallMLP",
    "SparseMoE",
    "SwitchNorm1d",
    "SwitchNormGate",
    "TwoConvCNN",
]
