"""Mixtures of experts, gates and experts; they do not depend on the federation."""

from fedmoe_pl.models.experts.bilstm import BiLSTM
from fedmoe_pl.models.experts.cnn import CNN
from fedmoe_pl.models.experts.fcn import SmallFCN
from fedmoe_pl.models.experts.fedavg_cnn import ConvBlock, ConvExpert, FedAvgCNN
from fedmoe_pl.models.experts.ifca_cnn import IFCACNN
from fedmoe_pl.models.experts.leaf_cnn import LEAFCNN
from fedmoe_pl.models.experts.lenet5 import LeNet5
from fedmoe_pl.models.experts.mlp import RepresentationMLP, SmallMLP
from fedmoe_pl.models.experts.two_conv_cnn import TwoConvCNN
from fedmoe_pl.models.experts.vgg16 import VGG16
from fedmoe_pl.models.gates.fixed import ConstantGate, EqualWeights, FixedGate, GlobalOnly, LocalOnly, MixtureWeights
from fedmoe_pl.models.gates.gate import Gate
from fedmoe_pl.models.gates.linear import FeatureGate, LinearGate
from fedmoe_pl.models.gates.network import GateCNN, NetworkGate
from fedmoe_pl.models.gates.perceptron import MLPGate
from fedmoe_pl.models.gates.proxy import ProxyGate
from fedmoe_pl.models.gates.switch_norm import SwitchNormGate
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
