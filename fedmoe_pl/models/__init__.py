"""Experts, gates and the personalized mixture; nothing here knows of federations."""

from fedmoe_pl.models.clustered import ClusteredMoE
from fedmoe_pl.models.experts import VGG16, LeNet5, SmallMLP
from fedmoe_pl.models.gates import ConstantGate, FeatureGate, Gate, LinearGate
from fedmoe_pl.models.mixture import MixtureOfExperts
from fedmoe_pl.models.moe import PersonalizedMoE
from fedmoe_pl.models.network_gates import GateCNN, NetworkGate, SwitchNormGate
from fedmoe_pl.models.networks import CNN, IFCACNN, LEAFCNN, FedAvgCNN, TwoConvCNN
from fedmoe_pl.models.normalization import SwitchNorm1d
from fedmoe_pl.models.recurrent import BiLSTM

__all__ = [
    "CNN",
    "IFCACNN",
    "LEAFCNN",
    "VGG16",
    "BiLSTM",
    "ClusteredMoE",
    "ConstantGate",
    "FeatureGate",
    "FedAvgCNN",
    "Gate",
    "GateCNN",
    "LeNet5",
    "LinearGate",
    "MixtureOfExperts",
    "NetworkGate",
    "PersonalizedMoE",
    "SmallMLP",
    "SwitchNorm1d",
    "SwitchNormGate",
    "TwoConvCNN",
]
