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

from fedmoe_pl import models
from fedmoe_pl.algorithms import FedAvg, PMMoE
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
        phase_module, module, Phase("p", PMMoE() if isinstance(module, models.PooledMoE) else FedAvg(), **arguments)
    )


GATES = [("weight", partial(models.ConstantGate, weight)) for weight in (-0.1, 1.1, math.nan, [0.5, 0.6], [])]
MIXTURES = [
    ("local_expert", partial(models.PersonalizedMoE, models.SmallMLP(), models.SmallMLP(num_classes=7))),
    ("local_expert", lambda: models.PersonalizedMoE(Expert(), Expert(classes=1))(samples()[0])),  # would broadcast
    ("local_expert", partial(models.PersonalizedMoE, Expert(), [])),
    ("gate_lr", partial(models.PersonalizedMoE, Expert(), gate_lr=-1)),
    ("gate", partial(models.ClusteredMoE, Expert(), 2, gate=models.ConstantGate(0.5))),
    ("gate", partial(models.ClusteredMoE, Expert(), 1, gate=models.FeatureGate(6))),
    ("gate", partial(models.ClusteredMoE, models.SmallMLP(5), 2, gate=models.NetworkGate(GateNet(5)))),
    ("clusters_share_fc", partial(models.ClusteredMoE, Expert(), 2, clusters_share_fc=True)),
    ("global_expert", partial(models.ClusteredMoE, NoReset(), 2)),
    ("global_expert", partial(models.PersonalizedMoE, nn.Linear(5, 3), gate=models.FeatureGate())),
    ("global_expert", replaced(models.PersonalizedMoE(nn.Linear(5, 3)), gate=models.MLPGate(2))),
    ("local_expert", partial(models.PooledMoE, nn.Linear(5, 3), 2)),
    ("in_features", lambda: models.PersonalizedMoE(nn.Linear(5, 3), gate=models.LinearGate(9))(samples()[0])),
    ("gate", lambda: models.PersonalizedMoE(nn.Embedding(5, 3), gate=models.LinearGate(9))(torch.arange(4))),
    ("gate", partial(models.PersonalizedMoE, Expert(), gate=nn.Linear(5, 2))),
    ("gate", partial(models.ClusteredMoE, Expert(), 1, gate=nn.Linear(5, 2))),
    ("gate", partial(models.PooledMoE, Expert(), 2, gate=nn.Linear(5, 2))),
    ("gate", partial(models.SparseMoE, Embedding(), small_expert(), 2, gate=nn.Linear(6, 2))),
    ("gate", partial(model, gate=nn.Linear(5, 2))),
    ("gate", lambda: Phase("p", FedAvg(), gate=nn.Linear(5, 2))),
    ("loss", lambda: setattr(models.PersonalizedMoE(Expert()), "loss", nn.CrossEntropyLoss())),
    ("top_k", partial(models.PooledMoE, Expert(), 3, top_k=0)),
    ("mixing", replaced(models.PooledMoE(Expert(), 3), mixing="probabilities")),
    ("mixing", replaced(model(), mixing="probabilities")),
    (
        "local_experts",
        partial(models.RepresentationMoE, network(2), [network(4), models.RepresentationMLP(5, 4, 7, 3)]),
    ),
    ("local_experts", partial(models.RepresentationMoE, network(2), [], header=nn.Linear(2, 3))),
    ("header", partial(models.RepresentationMoE, nn.Linear(5, 2), [nn.Linear(5, 2)])),
    ("architectures", lambda: model(architectures=[0]).client_architecture(1)),
    ("load_balancing", partial(models.SparseMoE, Embedding(), small_expert(), load_balancing=-1)),
    ("expert", partial(models.SparseMoE, Embedding(), NoReset())),
    ("expert", partial(models.SparseMoE, Embedding(), nn.LazyLinear(3))),
    ("expert", partial(models.SparseMoE, Embedding(), nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3)))),
    ("mixing", partial(models.SparseMoE, Embedding(), small_expert(), mixing="probabilities")),
    ("num_clusters", lambda: models.ClusteredMoE(small_expert(), num_clusters=10**9)),
    ("num_experts", lambda: models.PooledMoE(Expert(), num_experts=10**9)),
    ("num_experts", lambda: models.SparseMoE(Embedding(), small_expert(), num_experts=[2, 10**9])),
    ("num_experts", lambda: models.SparseMoE(Embedding(), small_expert(), num_experts=[])),
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
    assert refused_argument(lambda: models.PersonalizedMoE(Expert(), **arguments)) == argument


@pytest.mark.parametrize(
    ("task", "mixing", "outputs", "targets"),
    [
        ("regression", "logits", (4,), (4, 1)),
        ("regression", "logits", (4, 1), (4, 3)),
        ("multilabel", "probabilities", (4, 3), (4, 1)),
        ("multiclass", "probabilities", (3, 3), (3,)),
    ],
)
@pytest.mark.parametrize("loss", [None, half_squared_error])
def test_outputs_that_a_loss_would_compare_with_several_targets_are_refused(task, mixing, outputs, targets, loss):
    module = models.PersonalizedMoE(Expert(), task=task, mixing=mixing, loss=loss)
    assert refused_argument(lambda: module.loss_of(torch.rand(outputs), torch.rand(targets))) == "task"


def test_a_function_may_take_the_place_of_the_method_loss():
    module = models.PersonalizedMoE(Expert())
    module.loss = lambda batch: (torch.tensor(2.0), {})
    assert module.loss(None)[0] == 2


def test_widths_that_no_shape_of_the_input_tells_are_refused_at_the_first_batch():
    module = models.RepresentationMoE(nn.Linear(5, 2), [nn.Linear(5, 1)], header=nn.Linear(2, 3))  # would broadcast
    assert refused_argument(lambda: module.mix(torch.zeros(2, 5))) == "local_experts"
