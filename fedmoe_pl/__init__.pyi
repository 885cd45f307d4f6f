from . import aggregation, algorithms, backends, callbacks, data, models
from .algorithms.algorithm import Algorithm, Messages, Parts
from .algorithms.client import Client, Update
from .backends.dp_sgd import DPSGD
from .deployment.reports import Reports
from .federation import Federation
from .models import (
    AdapterMoE,
    ClusteredMoE,
    LayerwiseAdapterMoE,
    MixtureOfExperts,
    PersonalizedMoE,
    RepresentationMoE,
    SparseMoE,
)
from .phases.client_failures import ClientFailures
from .phases.phase import Evaluate, Phase, Select, Train
from .version import __version__

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
    "Messages",
    "MixtureOfExperts",
    "Parts",
    "PersonalizedMoE",
    "Phase",
    "Reports",
    "RepresentationMoE",
    "Select",
    "SparseMoE",
    "Train",
    "Update",
    "__version__",
    "aggregation",
    "algorithms",
    "backends",
    "callbacks",
    "data",
    "models",
]
