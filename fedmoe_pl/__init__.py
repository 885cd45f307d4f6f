"""Personalized federated learning with mixtures of experts, as ordinary PyTorch Lightning."""

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Client, Update
from fedmoe_pl.backends.dp_sgd import DPSGD
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import (
    AdapterMoE,
    ClusteredMoE,
    LayerwiseAdapterMoE,
    MixtureOfExperts,
    PersonalizedMoE,
    RepresentationMoE,
    SparseMoE,
)
from fedmoe_pl.phases.participation import ClientFailures
from fedmoe_pl.phases.phase import Evaluate, Phase, Select, Train
from fedmoe_pl.version import __version__

__all__ = [
    "DPSGD",
    "AdapterMoE",
    "Algorithm",
    "Client",
    "ClientFailures",
    "ClusteredMoE",
    "Evaluate",
    "Federation",
    "LayerwiseAdapterMoE",
    "MixtureOfExperts",
    "PersonalizedMoE",
    "Phase",
    "RepresentationMoE",
    "Select",
    "SparseMoE",
    "Train",
    "Update",
    "__version__",
]
