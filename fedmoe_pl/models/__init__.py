"""Experts, gates and the personalized mixture; nothing here knows of federations."""

from fedmoe_pl.models.blocks import ConvBlock, ConvExpert
from fedmoe_pl.models.clustered import ClusteredMoE
from fedmoe_pl.models.experts import VGG16, LeNet5, RepresentationMLP, SmallMLP
from fedmoe_pl.models.gates import (
    ConstantGate,
    EqualWeights,
    FeatureGate,
    FixedGate,
    Gate,
    GlobalOnly,
    LinearGate,
    LocalOnly,
)
from fedmoe_pl.models.mixture import MixtureOfExperts
from fedmoe_pl.models.moe import PersonalizedMoE
from fedmoe_pl.models.network_gates import GateCNN, NetworkGate, SwitchNormGate
from fedmoe_pl.models.networks import CNN, IFCACNN, LEAFCNN, FedAvgCNN, TwoConvCNN
from fedmoe_pl.models.normalization import SwitchNorm1d
from fedmoe_pl.models.recurrent import BiLSTM
from fedmoe_pl.models.representation import RepresentationMoE
from fedmoe_pl.models.sparse import ProxyGate, SparseMoE

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
    "MixtureOfExperts",
    "NetworkGate",
    "PersonalizedMoE",
    "ProxyGate",
    "RepresentationMLP",
    "RepresentationMoE",
    "SmallMLP",
    "SparseMoE",
    "SwitchNorm1d",
    "SwitchNormGate",
    "TwoConvCNN",
]
