"""Experts, gates and the personalized mixture; nothing here knows of federations."""

from fedmoe_pl.models.experts import VGG16, LeNet5, SmallMLP
from fedmoe_pl.models.gates import ConstantGate, FeatureGate, Gate, LinearGate
from fedmoe_pl.models.mixture import MixtureOfExperts
from fedmoe_pl.models.moe import PersonalizedMoE

__all__ = [
    "VGG16",
    "ConstantGate",
    "FeatureGate",
    "Gate",
    "LeNet5",
    "LinearGate",
    "MixtureOfExperts",
    "PersonalizedMoE",
    "SmallMLP",
]
