"""Personalized federated learning with mixtures of experts, as ordinary PyTorch Lightning."""

from fedmoe_pl.algorithm import Algorithm, Client, Update
from fedmoe_pl.federation import Federation
from fedmoe_pl.models import MixtureOfExperts, PersonalizedMoE
from fedmoe_pl.phase import Phase

__all__ = ["Algorithm", "Client", "Federation", "MixtureOfExperts", "PersonalizedMoE", "Phase", "Update"]
