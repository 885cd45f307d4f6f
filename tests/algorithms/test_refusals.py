"""What algorithms, aggregations and server optimizers refuse, because it would give a wrong number without a word."""

import copy
import math
from functools import partial

import pytest
import torch
from helpers import blobs, mixture, phase, run, sparse_mixture
from helpers.architectures import pair
from helpers.backends import WithBatchNorm
from helpers.bare import sgd
from helpers.clusters import clustered, only
from helpers.mixtures_of_learners import learners
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import aggregation, algorithms
from fedmoe_pl.aggregation import CoordinateMedian, DifferentialPrivacy, GaussianNoise, UnderAttack
from fedmoe_pl.aggregation.aggregation import Cohort
from fedmoe_pl.algorithms import (
    ClusterMixture,
    EpsilonGreedyIFCA,
    FedAPEN,
    FedAvg,
    FedBN,
    FedEM,
    FedJETs,
    FedKD,
    FedMix,
    FedMoEDA,
    FedProto,
    FedRoD,
    FineTuning,
    KNNPer,
    LabelPrior,
    Local,
    PFedMe,
    PFLMoE,
    Scaffold,
)
from fedmoe_pl.algorithms.server_optimizers import FedAdam
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import EqualWeights, GlobalOnly, LinearGate, MixtureWeights, PersonalizedMoE, SparseMoE

OUT_OF_RANGE = [
    (algorithms.FedProx, {"mu": -1}),
    (algorithms.FedProx, {"mu": math.nan}),
    (algorithms.FedProx, {"mu": "high"}),
    (algorithms.Ditto, {"weighting": "size"}),
    (algorithms.PFedMe, {"inner_steps": 0}),
    (algorithms.FedMoEDA, {"top_p": "none"}),
    (algorithms.LabelPrior, {"tau": "validation"}),
    (algorithms.EpsilonGreedyIFCA, {"epsilon": 0, "schedule": "power"}),
    (algorithms.PFLMoE, {"gate_fraction": 0, "interleaved": True}),
    (aggregation.Bucketing, {"size": 0, "aggregation": CoordinateMedian()}),
    (aggregation.DifferentialPrivacy, {"max_norm": math.inf, "noise_multiplier": 1.0, "delta": 1e-5}),
    (FedAdam, {"beta1": 1.0, "params": [nn.Parameter(torch.ones(1))], "lr": 0.1}),
]


@pytest.mark.parametrize(("kind", "arguments"), OUT_OF_RANGE)
def test_a_value_out_of_range_is_refused(kind, arguments):
    with pytest.raises(InvalidArgumentError) as error:
        kind(**arguments)
    assert (error.value.owner, error.value.argument) == (kind.__name__, next(iter(arguments)))


def with_part(module, **parts):
    for name, part in parts.items():
        setattr(module, name, part)
    return module


MISFITS = {
    "load_balancing": (FedMix(1), with_part(sparse_mixture(), load_balancing=0.1)),
    "loss": (FedEM(), with_part(learners(), criterion=nn.CrossEntropyLoss(label_smoothing=0.1))),
    "num_experts": (FedJETs(1), with_part(sparse_mixture(), num_experts=[1, 2])),
    "local_expert": (FineTuning(), with_part(mixture(LinearGate(5)), local_expert=nn.Linear(5, 3))),
    "local_expert of theta": (PFedMe(), with_part(mixture(optimizer=sgd), local_expert=nn.Linear(5, 3))),
    "expert without a linear layer": (LabelPrior(), PersonalizedMoE(nn.Sequential(nn.Flatten()))),
    "global_expert without an extractor": (KNNPer(), PersonalizedMoE(nn.Linear(5, 3))),
    "global_expert without prototypes": (FedProto(), PersonalizedMoE(nn.Linear(5, 3))),
    "local_expert without an extractor": (FedKD(), PersonalizedMoE(nn.Linear(5, 3))),
    "expert without a bias": (LabelPrior(), PersonalizedMoE(nn.Linear(5, 3, bias=False))),
    "model of clusters": (EpsilonGreedyIFCA(), mixture()),
    "model of learners": (FedEM(), sparse_mixture()),
    "model of shared experts": (FedMix(1), learners()),
    "model with proxies": (FedMoEDA(), learners()),
    "gate of one cluster": (EpsilonGreedyIFCA(), clustered(gate=only(1))),
    "gate with each client's weights": (FedAPEN(), mixture(EqualWeights())),
    "mixing of probabilities": (FedAPEN(), pair(gate=MixtureWeights(), mixing="probabilities")),
    "mixing of two heads": (FedRoD(), with_part(mixture(), mixing="probabilities")),
    "mixing of logits": (FedEM(), SparseMoE(nn.Identity(), nn.Linear(5, 3), gate=MixtureWeights())),
    "shared without batch normalization": (FedBN(), mixture()),
    "shared without some elsewhere": (FedBN("*.classifier.*"), mixture(expert=WithBatchNorm())),
    "similarity of frozen layers": (FedMoEDA(similarity="updates", trainable="gate.*"), sparse_mixture()),
    "momentum": (Scaffold(), mixture()),
    "weight_decay": (Scaffold(), mixture(optimizer=partial(sgd, weight_decay=0.1))),
    "optimizer of two rates": (Scaffold(), with_part(mixture(LinearGate(5), optimizer=sgd), gate_lr=0.7)),
    "optimizer": (PFedMe(), mixture(optimizer=partial(torch.optim.Adam, lr=0.1))),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused(case):
    algorithm, module = MISFITS[case]
    with pytest.raises(InvalidArgumentError) as error:
        algorithm.server_init(module)
    assert error.value.argument == case.split(" ")[0]


@pytest.mark.parametrize(
    ("check", "argument"),
    [
        (UnderAttack(GaussianNoise(), [1, 5]).check, "attackers"),
        (DifferentialPrivacy(1.0, 1.0, 1e-5, quantile=0.5).check, "noise_multiplier"),
    ],
)
def test_an_aggregation_that_does_not_fit_the_cohort_is_refused(check, argument):
    with pytest.raises(InvalidArgumentError) as error:
        check({}, set(), Cohort(3, range(5)))
    assert error.value.argument == argument


@pytest.mark.parametrize("needed", ["global_exprt", "head"])
def test_a_part_that_the_model_lacks_is_refused_before_training(needed):
    with pytest.raises(AttributeError, match=f"has no attribute `{needed}`"):
        KNNPer(expert=needed).server_init(mixture())


class Scaled(nn.Module):
    """A linear layer whose bias is not all that is added to the scores."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x):
        return 2 * self.linear(x)


def test_a_bias_that_does_not_shift_the_scores_is_refused_when_a_client_has_samples_for_it(tmp_path):
    model = mixture(expert=Scaled())
    phases = [phase("FedAvg", FedAvg("global_expert.*"), gate=GlobalOnly()), phase("prior", LabelPrior())]
    with pytest.raises(InvalidArgumentError, match="whose bias is added to the scores"):
        run(phases, model, blobs(), tmp_path)


def test_a_name_with_a_slash_is_that_of_an_algorithm_s_tensor():
    module = mixture(LinearGate(5))
    module.global_expert.classifier.add_module("a/b", nn.Linear(3, 3))
    module.local_expert = copy.deepcopy(module.global_expert)
    clusters = clustered()
    clusters.local_expert.add_module("a/b", nn.Linear(3, 3))
    checked = [(each, module) for each in (FedAvg(), Local(), FineTuning(), PFLMoE(interleaved=True))]
    for algorithm, model in [*checked, (ClusterMixture(), clusters)]:
        with pytest.raises(MisconfigurationException, match="must not contain '/'"):
            algorithm.server_init(model)
