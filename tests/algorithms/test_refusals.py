"""What algorithms, aggregations and server optimizers refuse, because it would give a wrong number without a word."""

import copy
import math
from functools import partial

import pytest
import torch
from helpers import Embedding, Expert, blobs, mixture, phase, run, sparse_mixture
from helpers.architectures import pair
from helpers.backends import WithBatchNorm
from helpers.bare import two_experts
from helpers.clusters import clustered, only
from helpers.mixtures_of_learners import backbone, learners
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import aggregation, algorithms
from fedmoe_pl.aggregation import CoordinateMedian, DifferentialPrivacy, GaussianNoise, UnderAttack
from fedmoe_pl.aggregation.aggregation import Cohort
from fedmoe_pl.algorithms import (
    APFL,
    FD,
    FML,
    ClusterMixture,
    Ditto,
    EpsilonGreedyIFCA,
    FedALA,
    FedAPEN,
    FedAvg,
    FedBN,
    FedEM,
    FedJETs,
    FedKD,
    FedMix,
    FedMoEDA,
    FedPAC,
    FedProto,
    FedRoD,
    FineTuning,
    KNNPer,
    LabelPrior,
    Local,
    PerFedAvg,
    PFedMe,
    PFedMM,
    PFLMoE,
    PMMoE,
    Scaffold,
)
from fedmoe_pl.algorithms.server_optimizers import FedAdam
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import EqualWeights, GlobalOnly, LinearGate, MixtureWeights, PersonalizedMoE, SparseMoE

NAN, INF = math.nan, math.inf
OUT_OF_RANGE = {
    "FedProx": {"mu": (-1, NAN, INF, "high")},
    "Scaffold": {"server_lr": (0,)},
    "Ditto": {"weight": (-1,), "weighting": ("size",)},
    "APFL": {"alpha": (-0.1, 1.5), "alpha_lr": (-1,)},
    "PFedMe": {"weight": (0,), "inner_lr": (-1,), "server_lr": (0,), "inner_steps": (0,), "decay": (-1,)},
    "PerFedAvg": {"inner_lr": (-1,)},
    "FedRep": {"head_epochs": (-1,)},
    "FedRoD": {"prior_exponent": (-1,)},
    "FedPAC": {"weight": (-1,)},
    "FedProto": {"weight": (-1,), "prediction": ("mean",)},
    "FD": {"weight": (-1,), "outputs": ("classes",)},
    "FML": {"alpha": (1.5,), "beta": (-0.5,)},
    "FedKD": {"energy_start": (0, 1.5), "energy_end": (0,)},
    "FedAPEN": {"adaptability_fraction": (0.0, 1.0), "weight_lr": (-1,), "weight_epochs": (0,)},
    "FedALA": {"last_parameters": (-1,), "eta": (-0.5,), "max_passes": (0,), "batch_size": (0, 2**63)},
    "FedMix": {"experts_per_client": (0,), "entropy_weight": (-1,)},
    "FedJETs": {"experts_per_client": (0,)},
    "FedMoEDA": {"top_p": (-1, "none"), "interval": (0,), "temperature": (0,), "similarity": ("features",)},
    "KNNPer": {"k": (0,), "capacity": (1.5,), "weight": (-0.1,), "scale": (0,), "kernel": ("cosine",)},
    "LabelPrior": {"tau": (-0.5, NAN, "validation")},
    "OptInFedAvg": {"opt_out_clients": (-0.1, 1.0), "opt_out_data": (1.0, NAN)},
    "FineTuning": {"gate_fraction": (-0.1, 1)},
    "PFLMoE": {"gate_fraction": (-0.1, 1)},
    "EpsilonGreedyIFCA": {
        "epsilon": (-0.1, 1.1),
        "schedule": ("cosine",),
        "decay_rounds": (0,),
        "patience": (0,),
        "check_every_n_rounds": (0,),
        "good_init": (0, 1.1),
    },
    "InnerProductManipulation": {"scale": (0,)},
    "GaussianNoise": {"std": (0,)},
    "TrimmedMean": {"num_byzantine": (-1,)},
    "MultiKrum": {"num_byzantine": (-1,), "num_selected": (0,)},
    "CenteredClipping": {"max_norm": (0, NAN), "iterations": (0,)},
    "NearestNeighborMixing": {"num_byzantine": (-1,)},
    "Bucketing": {"size": (0, 2**63)},
    "DifferentialPrivacy": {
        "noise_multiplier": (-1, NAN),
        "max_norm": (0, INF, -INF),
        "delta": (0, 1.0),
        "quantile": (0, 1),
        "max_norm_lr": (0, INF),
        "bit_noise": (0,),
    },
    "FedAdam": {"lr": (0,), "tau": (0.0,), "beta1": (1.0,), "beta2": (-0.1,), "v0": (-1.0,)},
}
OTHERS = {
    "MultiKrum": {"num_byzantine": 1},
    "CenteredClipping": {"max_norm": 1.0},
    "NearestNeighborMixing": {"aggregation": CoordinateMedian(), "num_byzantine": 1},
    "Bucketing": {"aggregation": CoordinateMedian()},
    "DifferentialPrivacy": {"noise_multiplier": 1.0, "max_norm": 1.0, "delta": 1e-5},
    "FedAdam": {"params": [nn.Parameter(torch.ones(1))], "lr": 0.1},
}


@pytest.mark.parametrize(
    ("name", "argument", "value"),
    [
        (name, argument, value)
        for name in OUT_OF_RANGE
        for argument in OUT_OF_RANGE[name]
        for value in OUT_OF_RANGE[name][argument]
    ],
)
def test_a_value_out_of_range_is_refused(name, argument, value):
    made = getattr(algorithms if hasattr(algorithms, name) else aggregation, name, FedAdam)
    with pytest.raises(InvalidArgumentError) as error:
        made(**{**OTHERS.get(name, {}), argument: value})
    assert (error.value.owner, error.value.argument) == (name, argument)


def with_part(module, **parts):
    for name, part in parts.items():
        setattr(module, name, part)
    return module


WITHOUT_GATE = [Ditto(), APFL(), FML(), FedKD(), FedRoD(), FedProto(), FD(), FedPAC(), FedALA(), PerFedAvg()]
LIKELIHOODS = [(FedMix(1), sparse_mixture), (FedJETs(1), sparse_mixture), (FedEM(), learners), (PFedMM(), learners)]
MISFITS = {
    **{
        f"gate, {type(each).__name__}": (lambda each=each: each.check(two_experts(gate=LinearGate(5))))
        for each in (
            Ditto(),
            APFL(),
            PFedMe(),
            FML(),
            FedKD(),
            FedRoD(),
            FedProto(),
            FD(),
            FedPAC(),
            FedALA(),
            PerFedAvg(),
        )
    },
    **{
        f"{argument}, {type(each).__name__}": (
            lambda each=each, make=make, part=part: each.check(with_part(make(), **part))
        )
        for each, make in LIKELIHOODS
        for argument, part in (
            ("load_balancing", {"load_balancing": 0.1}),
            ("loss", {"criterion": nn.CrossEntropyLoss(label_smoothing=0.1)}),
            ("num_experts", {"num_experts": [1, 2]}),
        )
    },
    **{
        f"local_expert, {type(each).__name__}": (
            lambda each=each: each.check(with_part(mixture(LinearGate(5)), local_expert=nn.Linear(5, 3)))
        )
        for each in (FineTuning(), PFLMoE(interleaved=True), Ditto(), FedRoD())
    },
    "epsilon, by which a power is never reached": lambda: EpsilonGreedyIFCA(0, "power"),
    "gate_fraction, both of which alternate": lambda: PFLMoE(0, interleaved=True),
    "expert": lambda: FD("expert").check(mixture()),
    "expert that is not split": lambda: FedProto("gate").check(mixture()),
    "expert of neighbors": lambda: KNNPer().check(with_part(mixture(), global_expert=nn.Linear(5, 3))),
    "expert that is missing": lambda: PFLMoE().check(with_part(mixture(), local_expert=None)),
    "expert with a bias": lambda: LabelPrior(expert="global").check(mixture()),
    "expert without a linear layer": lambda: LabelPrior().check(PersonalizedMoE(nn.Sequential(nn.Flatten()))),
    "expert without a bias": lambda: LabelPrior().check(PersonalizedMoE(nn.Linear(5, 3, bias=False))),
    "model of two experts": lambda: FML().check(learners()),
    "model of clusters": lambda: EpsilonGreedyIFCA().check(mixture()),
    "model of learners": lambda: FedEM().check(sparse_mixture()),
    "model of shared experts": lambda: FedMix(1).check(learners()),
    "model with proxies": lambda: FedMoEDA().check(learners()),
    "model with a pool": lambda: PMMoE().check(mixture()),
    "gate of one cluster": lambda: EpsilonGreedyIFCA().check(clustered(gate=only(1))),
    "gate with each client's weights": lambda: FedAPEN().check(mixture(EqualWeights())),
    "mixing of probabilities": lambda: FedAPEN().check(pair(gate=MixtureWeights(), mixing="probabilities")),
    "mixing of two heads": lambda: FedRoD().check(with_part(mixture(), mixing="probabilities")),
    "mixing of logits": lambda: FedEM().check(SparseMoE(nn.Identity(), nn.Linear(5, 3), gate=MixtureWeights())),
    "embedding": lambda: FedEM().check(learners(embedding=Embedding())),
    "experts_per_client": lambda: FedMix(3).check(sparse_mixture(2)),
    "shared without batch normalization": lambda: FedBN().check(mixture()),
    "shared without some elsewhere": lambda: FedBN("*.classifier.*").check(mixture(expert=WithBatchNorm())),
    "similarity of layers that are not trained": lambda: FedMoEDA(similarity="updates", trainable="gate.*").check(
        sparse_mixture()
    ),
    "momentum": lambda: Scaffold().check(mixture()),
    "optimizer": lambda: PFedMe().check(mixture(optimizer=partial(torch.optim.Adam, lr=0.1))),
    "attackers": lambda: UnderAttack(GaussianNoise(), [1, 5]).check({}, set(), Cohort(3, range(3))),
    "noise_multiplier": lambda: DifferentialPrivacy(1.0, 1.0, 1e-5, quantile=0.5).check({}, set(), Cohort(4, range(8))),
}


@pytest.mark.parametrize("case", MISFITS)
def test_what_does_not_fit_is_refused(case):
    with pytest.raises(InvalidArgumentError) as error:
        MISFITS[case]()
    assert error.value.argument == case.split(",")[0].split(" ")[0]


def test_what_fits_is_accepted():
    for algorithm in WITHOUT_GATE:
        algorithm.check(two_experts(gate=EqualWeights()))
    for algorithm, make in LIKELIHOODS:
        algorithm.check(make())
    PFedMM().check(learners(embedding=backbone()))
    PFLMoE().check(PersonalizedMoE(Expert(), Expert(hidden=7), LinearGate(5)))


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
            algorithm.check(model)
