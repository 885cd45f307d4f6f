"""What algorithms, aggregations and server optimizers refuse, because it would give a wrong number without a word."""

import copy
import math
from functools import partial

import pytest
import torch
from helpers import Expert, blobs, mixture, phase, run, sparse_mixture
from helpers.adapted import adapted
from helpers.architectures import pair
from helpers.backends import WithBatchNorm
from helpers.bare import sgd
from helpers.clusters import clustered, only
from helpers.methods import METHODS, data
from helpers.mixtures_of_learners import learners
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import aggregation, algorithms
from fedmoe_pl.aggregation import CoordinateMedian, DifferentialPrivacy, GaussianNoise, UnderAttack
from fedmoe_pl.aggregation.aggregation import Cohort
from fedmoe_pl.algorithms.server_optimizers import FedAdam
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import EqualWeights, GlobalOnly, LinearGate, MixtureWeights, PersonalizedMoE, SparseMoE

OUT_OF_RANGE = [
    (algorithms.FedProx, {"mu": -1}),
    (algorithms.FedProx, {"mu": math.nan}),
    (algorithms.FedProx, {"mu": "high"}),
    (algorithms.Ditto, {"weighting": "size"}),
    (algorithms.PFedMe, {"inner_steps": 0}),
    (algorithms.FedLEASE, {"warmup_rounds": 0}),
    *((algorithms.HetLoRA, {"ranks": ranks}) for ranks in ([], [2, 0], [1.5])),
    (algorithms.CoMiGS, {"router_every": 0}),
    (algorithms.CoMiGS, {"router_steps": -1}),
    (algorithms.CoMiGS, {"importance": 1.0}),
    (algorithms.CoMiGS, {"balance": -1.0}),
    (algorithms.FedMoEDA, {"top_p": "none"}),
    (algorithms.LabelPrior, {"tau": "validation"}),
    (algorithms.EpsilonGreedyIFCA, {"epsilon": 0, "schedule": "power"}),
    (algorithms.PFLMoE, {"gate_fraction": 0, "interleaved": True}),
    (aggregation.Bucketing, {"size": 0, "aggregation": CoordinateMedian()}),
    (aggregation.DifferentialPrivacy, {"max_norm": math.inf, "noise_multiplier": 1.0, "delta": 1e-5}),
    *((aggregation.SecureAggregation, {"threshold": each}) for each in (1, 2.5)),
    *((aggregation.SecureAggregation, {"fraction_bits": each}) for each in (0, 53)),
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


def quantized():
    module = adapted()
    module.base.first.weight = nn.Parameter(torch.zeros(6, 5, dtype=torch.int8), requires_grad=False)
    return module


def tied():
    module = adapted()
    module.base.output = nn.Linear(5, 6, bias=False)
    module.base.output.weight = module.base.first.weight
    return module


def without_adapters():
    return with_part(adapted(), global_expert=nn.ModuleDict({"first": nn.Linear(5, 6)}))


MISFITS = {
    "load_balancing": (algorithms.FedMix(1), with_part(sparse_mixture(), load_balancing=0.1)),
    "loss": (algorithms.FedEM(), with_part(learners(), criterion=nn.CrossEntropyLoss(label_smoothing=0.1))),
    "num_experts": (algorithms.FedJETs(1), with_part(sparse_mixture(), num_experts=[1, 2])),
    "local_expert": (algorithms.FineTuning(), with_part(mixture(LinearGate(5)), local_expert=nn.Linear(5, 3))),
    "local_expert of theta": (algorithms.PFedMe(), with_part(mixture(optimizer=sgd), local_expert=nn.Linear(5, 3))),
    "expert without a linear layer": (algorithms.LabelPrior(), PersonalizedMoE(nn.Sequential(nn.Flatten()))),
    "global_expert without an extractor": (algorithms.KNNPer(), PersonalizedMoE(nn.Linear(5, 3))),
    "global_expert without prototypes": (algorithms.FedProto(), PersonalizedMoE(nn.Linear(5, 3))),
    "local_expert without an extractor": (algorithms.FedKD(), PersonalizedMoE(nn.Linear(5, 3))),
    "expert without a bias": (algorithms.LabelPrior(), PersonalizedMoE(nn.Linear(5, 3, bias=False))),
    "model of clusters": (algorithms.EpsilonGreedyIFCA(), mixture()),
    "model of learners": (algorithms.FedEM(), sparse_mixture()),
    "model of shared experts": (algorithms.FedMix(1), learners()),
    "model with proxies": (algorithms.FedMoEDA(), learners()),
    "gate of one cluster": (algorithms.EpsilonGreedyIFCA(), clustered(gate=only(1))),
    "gate with each client's weights": (algorithms.FedAPEN(), mixture(EqualWeights())),
    "mixing of probabilities": (algorithms.FedAPEN(), pair(gate=MixtureWeights(), mixing="probabilities")),
    "mixing of two heads": (algorithms.FedRoD(), with_part(mixture(), mixing="probabilities")),
    "mixing of logits": (algorithms.FedEM(), SparseMoE(nn.Identity(), nn.Linear(5, 3), gate=MixtureWeights())),
    "shared without batch normalization": (algorithms.FedBN(), mixture()),
    "shared without some elsewhere": (algorithms.FedBN("*.classifier.*"), mixture(expert=WithBatchNorm())),
    "similarity of frozen layers": (algorithms.FedMoEDA(similarity="updates", trainable="gate.*"), sparse_mixture()),
    "momentum": (algorithms.Scaffold(), mixture()),
    "weight_decay": (algorithms.Scaffold(), mixture(optimizer=partial(sgd, weight_decay=0.1))),
    "optimizer of two rates": (algorithms.Scaffold(), with_part(mixture(LinearGate(5), optimizer=sgd), gate_lr=0.7)),
    "optimizer": (algorithms.PFedMe(), mixture(optimizer=partial(torch.optim.Adam, lr=0.1))),
    "base with quantized weights": (algorithms.FedExLoRA(), quantized()),
    "base with tied weights": (algorithms.FedExLoRA(), tied()),
    "model without adapters": (algorithms.FedExLoRA(), without_adapters()),
    "model without adapters of a rank": (algorithms.HetLoRA([1]), without_adapters()),
    "ranks above that of the module": (algorithms.FlexLoRA([2, 4]), adapted(3)),
    "model with two whole experts": (algorithms.FedDPA(), mixture()),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused(case):
    algorithm, module = MISFITS[case]
    with pytest.raises(InvalidArgumentError) as error:
        algorithm.server_init(module)
    assert error.value.argument == case.split(" ")[0]


def test_experts_of_different_shapes_are_refused():
    with pytest.raises(MisconfigurationException, match="global_expert"):
        algorithms.FedALT().server_init(with_part(mixture(), local_expert=Expert(classes=4)))


@pytest.mark.parametrize("name", ["Scaffold", "PFedMe", "CoMiGS"])
def test_accumulated_gradients_are_refused(name, tmp_path):
    """A last step of fewer batches is smaller, and counts as one all the same."""
    method = METHODS[name]
    (its_phase,) = method.phases()
    its_phase.train.trainer = {"accumulate_grad_batches": 2}
    with pytest.raises(MisconfigurationException, match="accumulate_grad_batches is 2"):
        run([its_phase], method.model(), data(**method.split), tmp_path)


def test_epochs_that_never_reach_the_body_of_fedrep_are_refused_before_any_training(tmp_path):
    with pytest.raises(MisconfigurationException) as error:
        run([phase("it", algorithms.FedRep(head_epochs=2))], mixture(optimizer=sgd), blobs(), tmp_path, max_epochs=2)
    assert error.value.argument == "train.max_epochs" and "global_expert.extractor.1." in str(error.value)


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
        algorithms.KNNPer(expert=needed).server_init(mixture())


class Scaled(nn.Module):
    """A linear layer whose bias is not all that is added to the scores."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x):
        return 2 * self.linear(x)


def test_a_bias_that_does_not_shift_the_scores_is_refused_when_a_client_has_samples_for_it(tmp_path):
    model = mixture(expert=Scaled())
    phases = [
        phase("FedAvg", algorithms.FedAvg("global_expert.*"), gate=GlobalOnly()),
        phase("prior", algorithms.LabelPrior()),
    ]
    with pytest.raises(InvalidArgumentError, match="whose bias is added to the scores"):
        run(phases, model, blobs(), tmp_path)


def test_a_name_with_a_slash_is_that_of_an_algorithm_s_tensor():
    module = mixture(LinearGate(5))
    module.global_expert.classifier.add_module("a/b", nn.Linear(3, 3))
    module.local_expert = copy.deepcopy(module.global_expert)
    clusters = clustered()
    clusters.local_expert.add_module("a/b", nn.Linear(3, 3))
    of_experts = algorithms.FedAvg(), algorithms.Local(), algorithms.FineTuning(), algorithms.PFLMoE(interleaved=True)
    for algorithm, model in (*((each, module) for each in of_experts), (algorithms.ClusterMixture(), clusters)):
        with pytest.raises(MisconfigurationException, match="must not contain '/'"):
            algorithm.server_init(model)
