"""Personalized federated learning with mixtures of experts, as ordinary PyTorch Lightning."""

from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Client, Update
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import ClusteredMoE, MixtureOfExperts, PersonalizedMoE, RepresentationMoE, SparseMoE
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.version import __version__

__all__ = [
    "Algorithm",
    "Client",
    "ClusteredMoE",
    "Federation",
    "MixtureOfExperts",
    "PersonalizedMoE",
    "Phase",
    "RepresentationMoE",
    "SparseMoE",
    "Update",
    "__version__",
]
