"""What would give wrong numbers is refused by its argument: parts that do not fit together, and values out of range."""

import math
from functools import partial

import pytest
import torch
from helpers import Embedding, Expert, small_expert
from helpers.clusters import GateNet
from helpers.data import refused_argument
from helpers.models import samples
from helpers.pfedmoe import model, network
from torch import nn

from fedmoe_pl.algorithms import FedAvg, PMMoE
from fedmoe_pl.models import (
    ClusteredMoE,
    ConstantGate,
    FeatureGate,
    LinearGate,
    MLPGate,
    NetworkGate,
    PersonalizedMoE,
    PooledMoE,
    RepresentationMLP,
    RepresentationMoE,
    SmallMLP,
    SparseMoE,
)
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.rounds.begin import phase_module


class NoReset(nn.Module):
    """Has a parameter of its own and no way to draw it anew."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.weight * x[:, :3]


def half_squared_error(outputs, targets):
    return (outputs - targets).square().mean() / 2


def replaced(module, **arguments):
    """A phase's module, in which parts are replaced."""
    return partial(
        phase_module, module, Phase("p", PMMoE() if isinstance(module, PooledMoE) else FedAvg(), **arguments)
    )


GATES = [("weight", partial(ConstantGate, weight)) for weight in (-0.1, 1.1, math.nan, [0.5, 0.6], [])]
MIXTURES = [
    ("local_expert", partial(PersonalizedMoE, SmallMLP(), SmallMLP(num_classes=7))),
    ("local_expert", lambda: PersonalizedMoE(Expert(), Expert(classes=1))(samples()[0])),  # would broadcast
    ("gate_lr", partial(PersonalizedMoE, Expert(), gate_lr=-1)),
    ("gate", partial(ClusteredMoE, Expert(), 2, gate=ConstantGate(0.5))),
    ("gate", partial(ClusteredMoE, Expert(), 1, gate=FeatureGate(6))),
    ("gate", partial(ClusteredMoE, SmallMLP(5), 2, gate=NetworkGate(GateNet(5)))),
    ("clusters_share_fc", partial(ClusteredMoE, Expert(), 2, clusters_share_fc=True)),
    ("global_expert", partial(ClusteredMoE, NoReset(), 2)),
    ("global_expert", partial(PersonalizedMoE, nn.Linear(5, 3), gate=FeatureGate())),
    ("global_expert", replaced(PersonalizedMoE(nn.Linear(5, 3)), gate=MLPGate(2))),
    ("local_expert", partial(PooledMoE, nn.Linear(5, 3), 2)),
    ("in_features", lambda: PersonalizedMoE(nn.Linear(5, 3), gate=LinearGate(9))(samples()[0])),
    ("gate", lambda: PersonalizedMoE(nn.Embedding(5, 3), gate=LinearGate(9))(torch.arange(4))),
    ("top_k", partial(PooledMoE, Expert(), 3, top_k=0)),
    ("mixing", replaced(PooledMoE(Expert(), 3), mixing="probabilities")),
    ("mixing", replaced(model(), mixing="probabilities")),
    ("local_experts", partial(RepresentationMoE, network(2), [network(4), RepresentationMLP(5, 4, 7, 3)])),
    ("header", partial(RepresentationMoE, nn.Linear(5, 2), [nn.Linear(5, 2)])),
    ("architectures", lambda: model(architectures=[0]).client_architecture(1)),
    ("load_balancing", partial(SparseMoE, Embedding(), small_expert(), load_balancing=-1)),
    ("expert", partial(SparseMoE, Embedding(), NoReset())),
    ("expert", partial(SparseMoE, Embedding(), nn.LazyLinear(3))),
    ("expert", partial(SparseMoE, Embedding(), nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)))),
    ("mixing", partial(SparseMoE, Embedding(), small_expert(), mixing="probabilities")),
    ("num_clusters", lambda: ClusteredMoE(small_expert(), num_clusters=10**9)),
    ("num_experts", lambda: PooledMoE(Expert(), num_experts=10**9)),
    ("num_experts", lambda: SparseMoE(Embedding(), small_expert(), num_experts=[2, 10**9])),
]
TASKS = [
    ("mixing", {"mixing": "logit"}),
    ("task", {"task": "regresion"}),
    ("task", {"task": "multiclass", "loss": nn.MSELoss()}),
    ("task", {"loss": half_squared_error}),
    ("loss", {"loss": nn.CrossEntropyLoss(reduction="sum")}),
    ("mixing", {"task": "regression", "mixing": "probabilities"}),
    ("mixing", {"task": "binary", "mixing": "log_probabilities"}),
    ("mixing", {"loss": nn.CrossEntropyLoss(), "mixing": "probabilities_without_log"}),
]


@pytest.mark.parametrize(("argument", "make"), [*GATES, *MIXTURES])
def test_an_argument_is_refused(argument, make):
    assert refused_argument(make) == argument


@pytest.mark.parametrize(("argument", "arguments"), TASKS)
def test_what_does_not_fit_the_task_is_refused(argument, arguments):
    assert refused_argument(lambda: PersonalizedMoE(Expert(), **arguments)) == argument


def test_widths_that_no_shape_of_the_input_tells_are_refused_at_the_first_batch():
    module = RepresentationMoE(nn.Linear(5, 2), [nn.Linear(5, 1)], header=nn.Linear(2, 3))  # would broadcast
    assert refused_argument(lambda: module.mix(torch.zeros(2, 5))) == "local_experts"
