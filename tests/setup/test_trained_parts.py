"""Only trained experts are evaluated: in the phase, or in one that it starts from."""

import pytest
import torch
from helpers import blobs, mixture, run
from helpers.clusters import clustered, only
from helpers.methods import linear_gate

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import (
    FD,
    ClusterMixture,
    EpsilonGreedyIFCA,
    FedAvg,
    FedPAC,
    FedProto,
    FineTuning,
    KNNPer,
    Local,
    PerFedAvg,
    PFLMoE,
)
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import ConstantGate, EqualWeights, GlobalOnly, LocalOnly

TRAIN_ONE = (FedProto, FD, FedPAC, PerFedAvg)


def fitted(tmp_path, *phases, model=None):
    return run([*phases], model or mixture(optimizer=torch.optim.SGD), blobs(), tmp_path)


def fedavg(**kwargs) -> Phase:
    return Phase("FedAvg", FedAvg("global_expert.*"), gate=GlobalOnly(), **kwargs)


@pytest.mark.parametrize("gate", [EqualWeights, LocalOnly, lambda: ConstantGate(0.3), lambda: None])
@pytest.mark.parametrize("algorithm", TRAIN_ONE)
def test_an_expert_that_no_phase_trains_is_not_evaluated(algorithm, gate, tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"Phase 'it': gate .* because no phase trains local_expert;"):
        fitted(tmp_path, Phase("it", algorithm(), gate=gate()))
    assert not any(tmp_path.iterdir()), "before any training"


@pytest.mark.few(1)
@pytest.mark.parametrize("expert", ["global_expert", "local_expert"])
@pytest.mark.parametrize("algorithm", TRAIN_ONE)
def test_the_expert_that_is_trained_is_evaluated(algorithm, expert, tmp_path):
    gate = GlobalOnly() if expert == "global_expert" else LocalOnly()
    results = fitted(tmp_path, Phase("it", algorithm(expert=expert), gate=gate)).results
    assert 0 <= results["it"].spread("global_test").mean <= 1


REFUSED = {
    "a pattern leaves it out": lambda: [Phase("it", FedAvg(trainable="global_expert.*"))],
    "the earlier phase is not the start": lambda: [
        fedavg(),
        Phase("it", Local("local_expert.*"), gate=linear_gate(), start="initial"),
    ],
    "the earlier phase's gate left it out": lambda: [
        Phase("all", FedAvg(), gate=LocalOnly()),
        Phase("it", Local("local_expert.*"), gate=linear_gate(), start="all"),
    ],
    "the part starts elsewhere": lambda: [
        Phase("Local", Local("local_expert.*"), gate=LocalOnly()),
        Phase("it", PFLMoE(0), gate=linear_gate(), start={"local_expert": "Local"}),
    ],
}


@pytest.mark.parametrize("phases", REFUSED.values(), ids=REFUSED)
def test_patterns_starts_and_gates_say_what_is_trained(phases, tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"Phase 'it': gate is .* weighs trained experts only"):
        fitted(tmp_path, *phases())


ACCEPTED = {
    "trained in the start of the start": lambda: [
        fedavg(),
        Phase("tuned", FineTuning(gate_fraction=0.25), gate=LocalOnly()),
        Phase("it", PFLMoE(), gate=linear_gate()),
    ],
    "trained by the mixture's loss": lambda: [Phase("it", FedAvg("global_expert.*"))],
    "not evaluated": lambda: [Phase("it", FedProto(), gate=LocalOnly(), evaluate=False)],
    "the gate is not asked": lambda: [fedavg(), Phase("it", KNNPer(), gate=EqualWeights())],
    "trained in every second round": lambda: [
        fedavg(),
        Phase("it", PFLMoE(interleaved=True), rounds=2, gate=linear_gate()),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("phases", ACCEPTED.values(), ids=ACCEPTED)
def test_what_is_trained_is_not_refused(phases, tmp_path):
    assert fitted(tmp_path, *phases()).run.states["it"].finished


@pytest.mark.slow
def test_clusters_are_trained_one_at_a_time(tmp_path):
    ifca = [
        Phase("Local", Local("local_expert.*"), gate=only(3)),
        Phase("IFCA", EpsilonGreedyIFCA(0.0), gate=only(0), start="Local"),
    ]
    fitted(tmp_path, *ifca, Phase("it", ClusterMixture(), gate=EqualWeights()), model=clustered(3))
    ifca[1].start = "initial"
    with pytest.raises(InvalidArgumentError, match="no phase trains local_expert"):
        fitted(tmp_path, *ifca, Phase("it", ClusterMixture(), gate=EqualWeights()), model=clustered(3))


@pytest.mark.slow
def test_a_gate_that_leaves_out_all_that_a_phase_trains_is_pointed_out(tmp_path):
    with pytest.warns(UserWarning, match="'it': gate is GlobalOnly, which gives no weight to local_expert, and this"):
        fitted(tmp_path, fedavg(), Phase("it", FineTuning(), gate=GlobalOnly()))
    untrained = Phase("it", FineTuning(), gate=GlobalOnly(), train=Train(max_epochs=0))
    fitted(tmp_path, fedavg(), untrained)  # warnings are errors
    with pytest.raises(InvalidArgumentError, match=r"GlobalOnly, .* out all that Local trains, such as 'local_expert"):
        fitted(tmp_path, fedavg(), Phase("it", Local("local_expert.*"), gate=GlobalOnly()))


def test_a_frozen_expert_may_be_pretrained(tmp_path):
    model = mixture()
    model.local_expert.requires_grad_(False)
    with pytest.warns(UserWarning, match="local_expert, but no phase trains it, because its parameters are frozen"):
        fitted(tmp_path, Phase("it", FedProto(), gate=EqualWeights()), model=model)
