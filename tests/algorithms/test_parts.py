"""Models that several algorithms refuse, because their losses leave a part of them out."""

import pytest
import torch
from helpers import sparse_mixture
from helpers.bare import two_experts
from helpers.mixtures_of_learners import learners
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.algorithms import (
    APFL,
    FD,
    FML,
    Ditto,
    FedALA,
    FedEM,
    FedJETs,
    FedKD,
    FedMix,
    FedPAC,
    FedProto,
    FedRoD,
    PerFedAvg,
    PFedMe,
    PFedMM,
)
from fedmoe_pl.models import EqualWeights, LinearGate

LIKELIHOODS = pytest.mark.parametrize(
    ("algorithm", "made"),
    [(FedMix(1), sparse_mixture), (FedJETs(1), sparse_mixture), (FedEM(), learners), (PFedMM(), learners)],
)


@pytest.mark.parametrize(
    "algorithm",
    [Ditto(), APFL(), PFedMe(), FML(), FedKD(), FedRoD(), FedProto(), FD(), FedPAC(), FedALA(), PerFedAvg()],
)
def test_a_gate_that_would_stay_random_is_refused(algorithm):
    algorithm.check(two_experts(gate=EqualWeights()))
    with pytest.raises(MisconfigurationException) as error:
        algorithm.check(two_experts(gate=LinearGate(5)))
    assert str(error.value) == (
        "PersonalizedMoE: gate is a LinearGate, but must be EqualWeights, GlobalOnly or another fixed one, because "
        f"{type(algorithm).__name__} trains no gate."
    )


@LIKELIHOODS
def test_a_balancing_loss_that_would_be_left_out_is_refused(algorithm, made):
    module, name = made(), type(algorithm).__name__
    algorithm.check(module)
    module.load_balancing = 0.1
    with pytest.raises(MisconfigurationException) as error:
        algorithm.check(module)
    assert str(error.value) == (
        f"{name}: load_balancing is 0.1, but must be 0, because the loss of {name} has no such term."
    )


@LIKELIHOODS
def test_a_loss_of_the_model_that_would_be_left_out_is_refused(algorithm, made):
    module, name = made(), type(algorithm).__name__
    module.criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)
    with pytest.raises(MisconfigurationException) as error:
        algorithm.check(module)
    assert str(error.value) == (
        f"{name}: loss is a CrossEntropyLoss, but must be left out, because {name} trains with the likelihood of the "
        "classes."
    )
