"""The label prior against Bayes' rule and a computation by hand, below other phases, and what it refuses."""

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, blobs, mixture, sparse_mixture, tensors
from helpers.clusters import clustered, only
from helpers.runs import federation
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import Phase, Train, algorithms
from fedmoe_pl.models import EqualWeights, FeatureGate, GlobalOnly, LinearGate, LocalOnly

SIZES = (23, 8, 1)


def fedavg(rounds=2, **kwargs) -> Phase:
    return Phase("FedAvg", algorithms.FedAvg("global_expert.*"), rounds=rounds, gate=GlobalOnly(), **kwargs)


def prior(algorithm=None, name="prior", **kwargs) -> Phase:
    return Phase(name, algorithm or algorithms.LabelPrior(), gate=GlobalOnly(), **kwargs)


def fitted(path, *phases, model=None, data=None, ckpt_path=None, **kwargs):
    run = federation(path, [*phases] or [fedavg(), prior()], **kwargs)
    run.fit(mixture() if model is None else model, data or blobs(SIZES), ckpt_path=ckpt_path)
    return run


def log_shares(data, client, classes=3):
    counts = torch.bincount(data.y[data.train_samples[client]], minlength=classes).double()
    return ((counts + 1) / (counts.sum() + classes)).log()


@pytest.mark.few("0.5")
@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_scores_are_those_of_the_federated_model_and_tau_times_the_logarithm_of_the_shares(tmp_path, tau):
    run, data = fitted(tmp_path, fedavg(), prior(algorithms.LabelPrior(tau))), blobs(SIZES)
    for client in range(3):
        expected = run.client_module("FedAvg", client)(data.x) + tau * log_shares(data, client)
        torch.testing.assert_close(run.client_module("prior", client)(data.x), expected, rtol=0, atol=1e-12)


def test_tau_is_chosen_by_the_loss_on_the_client_s_validation_samples(tmp_path):
    data = blobs((60, 31, 1), validation_fraction=0.4)
    run = fitted(tmp_path, fedavg(), prior(algorithms.LabelPrior("auto")), data=data)
    chosen = [run.run.states["prior"].clients[client]["prior/tau"].item() for client in range(3)]
    with torch.no_grad():
        for client in range(2):
            samples = data.validation_samples[client]
            scores = run.client_module("FedAvg", client)(data.x[samples])
            taus = [i / 10 for i in range(21)]
            losses = [F.cross_entropy(scores + tau * log_shares(data, client), data.y[samples]) for tau in taus]
            assert chosen[client] == taus[min(range(21), key=losses.__getitem__)]
            expected = run.client_module("FedAvg", client)(data.x) + chosen[client] * log_shares(data, client)
            torch.testing.assert_close(run.client_module("prior", client)(data.x), expected, rtol=0, atol=1e-12)
    assert not len(data.validation_samples[2]) and chosen[2] == 1, "without validation samples, it is Bayes' rule"
    assert len({*chosen}) == 3, "the test shows nothing if all take the same"


def test_a_gate_mixes_the_corrected_expert_and_one_that_starts_uncorrected(tmp_path):
    data = blobs((23, 12))
    mixtures = [
        Phase("equal", algorithms.PFLMoE(), gate=EqualWeights(), train=Train(max_epochs=0)),
        Phase("MF", algorithms.PFLMoE(), gate=LinearGate(5).double()),
        Phase("MFE", algorithms.PFLMoE(), gate=FeatureGate(6).double()),
    ]
    for one in mixtures:
        one.start = {"global_expert": "prior", "local_expert": "tuned"}
    tuned = Phase("tuned", algorithms.FineTuning(gate_fraction=0.25), gate=LocalOnly())
    run = fitted(tmp_path, fedavg(), prior(), tuned, *mixtures, data=data)
    for client in range(2):
        before, local = (run.client_module(name, client) for name in ("FedAvg", "tuned"))
        scores = before.global_expert(data.x) + log_shares(data, client)
        assert torch.equal(local.global_expert(data.x), before.global_expert(data.x)), "tuned follows FedAvg"
        for one in mixtures:
            module = run.client_module(one.name, client)
            weights = module.mix(data.x)[1]
            expected = weights[:, :1] * scores + weights[:, 1:] * local.local_expert(data.x)
            torch.testing.assert_close(module(data.x), expected, rtol=0, atol=1e-12)


@pytest.mark.few(1)
@pytest.mark.parametrize(("start", "copied"), [("prior", "prior"), (None, "FedAvg")])
def test_a_local_expert_starts_as_a_copy_of_what_the_client_has_in_the_phase_of_its_start(start, copied, tmp_path):
    tuned = Phase("tuned", algorithms.FineTuning(), start=start, gate=LocalOnly(), train=Train(max_epochs=0))
    run, x = fitted(tmp_path, fedavg(), prior(), tuned), blobs(SIZES).x
    before, after = (run.client_module(name, 1) for name in (copied, "tuned"))
    assert torch.equal(after.local_expert(x), before.global_expert(x))
    assert torch.equal(after.global_expert(x), before.global_expert(x))


def test_of_clusters_it_corrects_all_or_the_chosen_one(tmp_path):
    data = blobs((23, 12))
    phases = [
        Phase("Local", algorithms.Local("local_expert.*"), gate=only(3)),
        Phase("IFCA", algorithms.EpsilonGreedyIFCA(0.3), gate=only(0), start="Local"),
        Phase("all", algorithms.LabelPrior(expert="global_experts"), gate=only(0)),
        Phase("mixture", algorithms.ClusterMixture(), gate=EqualWeights(), start="all", train=Train(max_epochs=0)),
        Phase("own", algorithms.FineTunedCluster(), start="IFCA", gate=only(0), train=Train(max_epochs=0)),
        Phase("prior", algorithms.LabelPrior(expert="global_experts.0"), start="own", gate=only(0)),
    ]
    run = fitted(tmp_path, *phases, model=clustered(3), data=data)
    for client in range(2):
        shift = log_shares(data, client)
        original, every = (run.client_module(name, client) for name in ("IFCA", "mixture"))
        models = [expert(data.x) for expert in original.global_experts]
        for expert in every.global_experts:  # IFCA shows each client its own cluster first
            assert min((expert(data.x) - scores - shift).abs().max() for scores in models) < 1e-12
        assert torch.equal(every.local_expert(data.x), original.local_expert(data.x))
        own, corrected = (run.client_module(name, client) for name in ("own", "prior"))
        torch.testing.assert_close(
            corrected.global_experts[0](data.x), own.global_experts[0](data.x) + shift, rtol=0, atol=1e-12
        )
        assert_same_bits(tensors(corrected, "global_experts.1"), tensors(own, "global_experts.1"))


def test_an_expert_after_an_embedding_is_corrected(tmp_path):
    names = ["embedding.*", "experts.0.*"]
    phases = [
        Phase("FedAvg", algorithms.FedAvg(names, names), gate=GlobalOnly()),
        Phase("prior", algorithms.LabelPrior(expert="experts.0"), gate=GlobalOnly()),
    ]
    run, data = fitted(tmp_path, *phases, model=sparse_mixture()), blobs(SIZES)
    for client in range(3):
        expected = run.client_module("FedAvg", client)(data.x) + log_shares(data, client)
        torch.testing.assert_close(run.client_module("prior", client)(data.x), expected, rtol=0, atol=1e-12)


def test_it_needs_a_federated_model_that_is_not_corrected_yet(tmp_path):
    with pytest.raises(MisconfigurationException, match="start is 'Local', but must be a federated phase"):
        federation(tmp_path, [Phase("Local", algorithms.Local()), prior(start="Local")])
    with pytest.raises(MisconfigurationException, match="a phase in which 'global_expert' has no label prior yet"):
        federation(tmp_path, [fedavg(), prior(), prior(name="twice", start="prior")])
    assert not algorithms.LabelPrior(expert="global_experts.1").missing_start(
        [algorithms.LabelPrior(expert="global_experts.0"), algorithms.FedAvg()]
    )
