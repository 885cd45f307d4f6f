"""Mixtures of experts, gates and experts; they do not depend on the federation."""

from fedmoe_pl.models.adapters import LoRA
from fedmoe_pl.models.experts import (
    CNN,
    IFCACNN,
    LEAFCNN,
    VGG16,
    BiLSTM,
    ConvBlock,
    ConvExpert,
    FedAvgCNN,
    LeNet5,
    RepresentationMLP,
    SmallFCN,
    SmallMLP,
    TwoConvCNN,
)
from fedmoe_pl.models.gates import (
    ConstantGate,
    EqualWeights,
    FeatureGate,
    FixedGate,
    Gate,
    GateCNN,
    GlobalOnly,
    LinearGate,
    LocalOnly,
    MixtureWeights,
    MLPGate,
    NetworkGate,
    ProxyGate,
    SwitchNormGate,
)
from fedmoe_pl.models.layers import SwitchNorm1d
from fedmoe_pl.models.mixtures.adapter_moe import AdapterMoE, ClusteredAdapterMoE, LayerwiseAdapterMoE
from fedmoe_pl.models.mixtures.clustered import ClusteredMoE
from fedmoe_pl.models.mixtures.mixture import MixtureOfExperts
from fedmoe_pl.models.mixtures.personalized import PersonalizedMoE
from fedmoe_pl.models.mixtures.pooled import PooledMoE
from fedmoe_pl.models.mixtures.representation import RepresentationMoE
from fedmoe_pl.models.mixtures.sparse import SparseMoE
from fedmoe_pl.models.pretrained import pretrained
from fedmoe_pl.models.routers import AdaptiveTokenGate, SimilarityGate, TokenGate

__all__ = [
    "CNN",
    "IFCACNN",
    "LEAFCNN",
    "VGG16",
    "AdapterMoE",
    "AdaptiveTokenGate",
    "BiLSTM",
    "ClusteredAdapterMoE",
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
    "LayerwiseAdapterMoE",
    "LeNet5",
    "LinearGate",
    "LoRA",
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
    "SimilarityGate",
    "SmallFCN",
    "SmallMLP",
    "SparseMoE",
    "SwitchNorm1d",
    "SwitchNormGate",
    "TokenGate",
    "TwoConvCNN",
    "pretrained",
]
