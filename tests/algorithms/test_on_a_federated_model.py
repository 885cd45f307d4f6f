"""kNN-Per, the label prior and PM-MoE, which add to a finished federated model, against computations by hand."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, blobs, client_generator, methods, mixture, sparse_mixture, tensors
from helpers.clusters import clustered, only
from helpers.methods import pooled
from helpers.runs import federation
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Generator

from fedmoe_pl import Phase, Train, algorithms
from fedmoe_pl.algorithms import FedAvg, KNNPer, PMMoE
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import EqualWeights, FeatureGate, GlobalOnly, LinearGate, LocalOnly, MLPGate
from fedmoe_pl.phases.client_failures import ClientFailures
from fedmoe_pl.seeds import derive_seed
from fedmoe_pl.trees import subtree

SIZES = (23, 8, 1)


def fedavg(rounds=2, **kwargs) -> Phase:
    return Phase("FedAvg", FedAvg("global_expert.*"), rounds=rounds, gate=GlobalOnly(), **kwargs)


def fitted(path, *phases, model=None, data=None, **kwargs):
    run = federation(path, [*phases], **kwargs)
    run.fit(mixture() if model is None else model, data or blobs(SIZES))
    return run


# kNN-Per


def shuffled(data, client):
    """The client's samples in the order of which the first fifth are queries."""
    samples = data.train_samples[client]
    return samples[torch.randperm(len(samples), generator=Generator().manual_seed(derive_seed(0, 2, client, 3)))]


def by_hand(expert, data, stored, x, k, kernel):
    """The probabilities of the expert and of the neighbors, sample by sample."""
    z, labels = expert.extractor(data.x[stored]), data.y[stored].tolist()
    both = []
    for features, logits in zip(expert.extractor(x), expert(x), strict=True):
        distances = [(features - other).square().sum().item() for other in z]
        weights = torch.zeros(3, dtype=torch.float64)
        for index in sorted(range(len(z)), key=lambda index: distances[index])[:k]:
            weights[labels[index]] += torch.exp(torch.tensor(-kernel(distances[index]), dtype=torch.float64))
        both.append((logits.softmax(0), weights / weights.sum()))
    return both


@pytest.mark.parametrize("kernel", ["squared", "euclidean"])
def test_weights_and_predictions_equal_those_by_hand(tmp_path, kernel):
    def exponent(squared_distance):
        return squared_distance / (6 * 0.5) if kernel == "squared" else squared_distance**0.5 / 0.5

    data, algorithm = blobs((40, 25, 1)), KNNPer(k=3, kernel=kernel, scale=0.5, capacity=0.7)
    run = fitted(tmp_path, fedavg(), Phase("kNN-Per", algorithm), data=data, trainer={"max_epochs": 0})
    chosen = []
    with torch.no_grad():
        for client in range(2):
            expert = run.client_module("FedAvg", client).global_expert
            samples = shuffled(data, client)
            queries, rest = samples[: len(samples) // 5], samples[len(samples) // 5 :]
            both = by_hand(expert, data, rest[: int(0.7 * len(rest))], data.x[queries], 3, exponent)
            right = [
                sum(
                    int(((1 - i / 10) * p + i / 10 * q).argmax() == y)
                    for (p, q), y in zip(both, data.y[queries], strict=True)
                )
                for i in range(11)
            ]
            weight = right.index(max(right)) / 10
            chosen.append(weight)
            assert run.run.states["kNN-Per"].clients[client]["knn/weight"].item() == pytest.approx(weight)
            stored = samples[: int(0.7 * len(samples))]
            mixed = [(1 - weight) * p + weight * q for p, q in by_hand(expert, data, stored, data.x[:20], 3, exponent)]
            expected = torch.stack(mixed).log() if weight else expert(data.x[:20])
            torch.testing.assert_close(
                run.run.client_predictor("kNN-Per", client)(data.x[:20]), expected, rtol=0, atol=1e-10
            )
    assert any(chosen), "the test shows nothing if no client uses its neighbors"
    assert run.run.states["kNN-Per"].clients[2]["knn/weight"].item() == 0, "with one sample, it has none to choose by"


@pytest.mark.few(2)
@pytest.mark.parametrize("algorithm", [KNNPer(weight=0.0), KNNPer(capacity=0.0), KNNPer(capacity=0.0, weight=1.0)])
def test_without_weight_or_neighbors_it_is_the_federated_model_to_the_bit(tmp_path, algorithm):
    run, x = fitted(tmp_path, fedavg(), Phase("kNN-Per", algorithm)), blobs(SIZES).x
    for client in range(3):
        expected = run.client_module("FedAvg", client)(x)
        assert_same_bits({"": run.run.client_predictor("kNN-Per", client)(x)}, {"": expected})
    clients = [[vars(one) for one in run.results[name].clients] for name in ("FedAvg", "kNN-Per")]
    for one, other in zip(*clients, strict=True):
        assert (one["reweighted_test"], one["global_test"]) == (other["reweighted_test"], other["global_test"])


def test_a_narrow_kernel_does_not_lose_the_nearest_neighbor(tmp_path):
    run = fitted(tmp_path, fedavg(), Phase("kNN-Per", KNNPer(k=3, weight=1.0, scale=1e-9)))
    assert torch.isfinite(run.run.client_predictor("kNN-Per", 0)(blobs(SIZES).x)).all()


# The label prior


def prior(algorithm=None, name="prior", **kwargs) -> Phase:
    return Phase(name, algorithm or algorithms.LabelPrior(), gate=GlobalOnly(), **kwargs)


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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_models_that_clients_make_alone_are_no_start_for_clients_without_one(tmp_path):
    of_all = Phase("later", algorithms.Local("global_expert.*"), gate=GlobalOnly(), start="prior")
    of_one, last = replace(of_all, clients=[2]), replace(of_all, name="last", start="later")
    of_two, in_use = prior(clients=[0, 2]), {"failures": ClientFailures(dropout=0.1)}
    for phases, settings, argument in (
        ([of_two, of_all], {}, "clients"),
        ([of_two, of_one, last], {}, "clients"),
        ([prior(), of_all], in_use, "failures.dropout"),
    ):
        with pytest.raises(InvalidArgumentError, match="starts from 'prior', whose models clients make") as error:
            fitted(tmp_path, fedavg(), *phases, **settings)
        assert error.value.argument == argument
    fitted(tmp_path, fedavg(rounds=1), of_two, of_one)


# PM-MoE


fedper = partial(methods.fedper, clients_per_round=None)
POOL = 3 * 21  # 6 features, 3 classes, a classifier for each of three clients


def pm_moe(**kwargs) -> Phase:
    return Phase("PM-MoE", PMMoE(), **{"start": "FedPer", "train": Train(max_epochs=2), "model": pooled(3), **kwargs})


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp("whole"), fedper(), pm_moe(), data=blobs())


def test_each_gate_equals_a_bare_loop_over_the_classifiers_of_all_clients(whole):
    data = blobs()
    experts = [tensors(whole.client_module("FedPer", client), "local_expert.") for client in range(3)]
    heads = [(e["local_expert.classifier.1.weight"], e["local_expert.classifier.1.bias"]) for e in experts]
    weight, bias = experts[0]["local_expert.extractor.1.weight"], experts[0]["local_expert.extractor.1.bias"]

    def logits(gate, x):
        z = F.linear(x, weight, bias).tanh()
        g = gate(z)
        threshold = g.sort(1).values[:, 1:2]  # the second largest of three
        g = torch.where(g >= threshold, g, 0)
        return sum(g[:, j : j + 1] * F.linear(z, *heads[j]) for j in range(3))

    for client in range(3):
        gate = MLPGate(3, 6, dropout=0.0).double()
        generator = client_generator(0, client, 2)  # after the two rounds of FedPer
        gate.reset_parameters()
        for _ in range(2):
            for x, y in data.batches(data.train_samples[client], generator=generator):
                gradients = torch.autograd.grad(F.cross_entropy(logits(gate, x), y), [*gate.parameters()])
                with torch.no_grad():
                    for parameter, gradient in zip(gate.parameters(), gradients, strict=True):
                        parameter -= 0.1 * gradient
        module = whole.client_module("PM-MoE", client)
        torch.testing.assert_close(tensors(module.gate), tensors(gate), rtol=0, atol=1e-10)
        torch.testing.assert_close(module(data.x[:9]), logits(gate, data.x[:9]), rtol=0, atol=1e-10)
        assert_same_bits(tensors(module, "local_expert."), experts[client])


def test_each_client_sends_its_classifier_and_receives_all_of_them_and_nothing_is_aggregated(whole):
    state = whole.run.states["PM-MoE"]
    assert set(state.server) == {f"pool.{i}.1.{name}" for i in range(3) for name in ("weight", "bias")}
    assert (state.traffic["parameters_up"], state.traffic["parameters_down"]) == (POOL, 3 * POOL)
    for client in range(3):
        own = tensors(whole.client_module("FedPer", client).local_expert.classifier)
        assert_same_bits(subtree(state.server, f"pool.{client}."), own)
        assert {name.split(".")[0] for name in state.clients[client]} == {"gate", "local_expert"}, "kept once"
    assert [evaluation.evaluation_point for evaluation in state.evaluations] == ["after local training"]


@pytest.mark.slow
def test_newcomers_receive_the_pool_and_train_a_gate(whole, tmp_path):
    later = federation(tmp_path, [fedper(), pm_moe()])
    later.personalize(mixture(), blobs((9, 6, 7, 5)), str(whole.run_dir / "checkpoints/last.ckpt"), rounds=1)
    assert_same_bits(later.run.states["PM-MoE"].server, whole.run.states["PM-MoE"].server)
    gates = [tensors(later.client_module("PM-MoE", client).gate)["layers.0.weight"] for client in range(4)]
    assert not torch.equal(gates[0], gates[1])
    for client in range(4):
        module = later.client_module("PM-MoE", client)
        assert_same_bits(
            subtree(dict(module.state_dict()), "pool."), subtree(whole.run.states["PM-MoE"].server, "pool.")
        )
        own = tensors(later.client_module("FedPer", client), "local_expert.")
        assert_same_bits(tensors(module, "local_expert."), own)


REFUSED = {
    "PMMoE: model is a PersonalizedMoE, but must be a PooledMoE.": [fedper(), pm_moe(model=None)],
    "PooledMoE: num_experts is 4, but must be num_clients, 3.": [fedper(rounds=1), pm_moe(model=pooled(4))],
    "start is 'FedPer', but must be a phase that trains local_expert.classifier.* and does not share it": [
        Phase("FedPer", FedAvg("local_expert.*"), gate=LocalOnly()),
        pm_moe(),
    ],
    "PMMoE: no client kept local_expert.classifier.*; `start` must be": [
        Phase("FedPer", FedAvg("global_expert.*"), gate=GlobalOnly()),
        pm_moe(),
    ],
}


@pytest.mark.parametrize("sentence", REFUSED)
def test_what_has_no_pool_of_trained_classifiers_is_refused(tmp_path, sentence):
    with pytest.raises(MisconfigurationException) as refusal:
        fitted(tmp_path, *REFUSED[sentence], data=blobs())
    assert sentence in str(refusal.value)


def test_equal_weights_are_an_ensemble_that_needs_no_training(tmp_path):
    run = fitted(tmp_path, fedper(), pm_moe(gate=EqualWeights(), model=pooled(3, top_k=None)), data=blobs())
    x, module = blobs().x, run.client_module("PM-MoE", 1)
    features = module.local_expert.extractor(x)
    torch.testing.assert_close(module(x), sum(head(features) for head in module.pool) / 3)
