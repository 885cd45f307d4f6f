"""What a client draws, chooses or computes in its own first round, whenever that is, and if it never has one."""

import pytest
import torch
from helpers import Embedding, Expert, assert_same_bits, blobs, mixture, phase, run, small_expert
from helpers.clusters import clustered, only
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import ClientFailures, Parts, Phase, Train, algorithms
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.models import FeatureGate, GlobalOnly, MLPGate, NetworkGate, PooledMoE, SparseMoE
from fedmoe_pl.trees import copy_module

pytestmark = pytest.mark.filterwarnings("ignore:.*client")  # that it failed


def failing(algorithm, client_id, rounds=(0,)):
    """The algorithm, with which the training of a client raises an exception in some rounds."""

    class Failing(type(algorithm)):
        def client_init(self, client, sent):
            constants = super().client_init(client, sent)
            if client.id == client_id and client.round in rounds:
                raise ZeroDivisionError
            return constants

    Failing.__module__ = type(algorithm).__module__
    algorithm.__class__ = Failing
    return algorithm


def expert_mixture():
    return mixture(FeatureGate(6))


def clusters():
    torch.manual_seed(3)
    return clustered(gate=NetworkGate(torch.nn.Linear(5, 4)).double(), seed=5)


DRAWING = {
    "ClusterMixture": (algorithms.ClusterMixture, clusters, "gate."),
    "SpecialistMixture": (algorithms.SpecialistMixture, expert_mixture, "gate."),
    "PFLMoE": (algorithms.PFLMoE, expert_mixture, "gate."),
    "interleaved": (lambda: algorithms.PFLMoE(interleaved=True), expert_mixture, "gate."),
    "PMMoE": (algorithms.PMMoE, lambda: PooledMoE(Expert(), 3, MLPGate(3, 6)).double(), "gate."),
    "FedMoEDA": (
        lambda: algorithms.FedMoEDA(shared_init=False),
        lambda: SparseMoE(Embedding(), small_expert(), 2).double(),
        "experts.",
    ),
}


def begun(algorithm, module, round, state=None) -> dict:
    """The tensors of client 1 as it begins a round."""
    data = blobs()
    torch.manual_seed(8)
    client = Client(1, round, 0, copy_module(module), data.train_samples[1], state or {}, data)
    algorithm.client_init(client, {})
    return client.module.state_dict()


@pytest.mark.parametrize("name", DRAWING)
def test_a_client_draws_in_its_first_round_whichever_that_is_and_keeps_what_it_has(name):
    make, make_module, prefix = DRAWING[name]
    algorithm, module = make(), make_module()
    initial = {each: t for each, t in module.state_dict().items() if each.startswith(prefix) and "bias" not in each}

    def drawn(round, state=None):
        state = begun(algorithm, module, round, state)
        return {each: state[each] for each in initial}

    first = drawn(0)
    assert first and not any(torch.equal(tensor, initial[each]) for each, tensor in first.items())
    for round in (1, 5):
        assert_same_bits(drawn(round), first)
        kept = {each: tensor + 1 for each, tensor in first.items()}
        assert_same_bits(drawn(round, kept), kept)


def test_a_gate_that_clients_share_is_drawn_in_the_first_round_alone():
    class Shared(algorithms.FedAvg):
        parts = Parts(new_gate=True)

    module, weight = expert_mixture(), "gate.linear.weight"
    are_same = [torch.equal(begun(Shared(), module, round)[weight], module.state_dict()[weight]) for round in (0, 1)]
    assert are_same == [False, True]


def test_a_late_client_draws_its_gate_also_if_it_has_one_of_an_earlier_phase(tmp_path):
    phases = [
        phase("FedAvg", algorithms.FedAvg("global_expert.*"), gate=GlobalOnly()),
        phase("first", algorithms.PFLMoE(0.25, interleaved=True)),
        phase("second", failing(algorithms.SpecialistMixture(), 1), rounds=2, train=Train(max_epochs=0), start="first"),
    ]
    phases[2].algorithm.missing_start = lambda *arguments: ""
    states = run(phases, expert_mixture(), blobs(), tmp_path, max_epochs=1).run.states
    for client in range(3):
        first, second = (states[name].clients[client]["gate.linear.weight"] for name in ("first", "second"))
        assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("make", "model", "gate"),
    [
        (algorithms.FineTunedCluster, lambda: clustered(gate=only(0), seed=5), None),
        (algorithms.LabelPrior, expert_mixture, GlobalOnly()),
        (lambda: algorithms.LabelPrior("auto"), expert_mixture, GlobalOnly()),
        (lambda: algorithms.KNNPer(weight=0.5), expert_mixture, GlobalOnly()),
    ],
)
@pytest.mark.few(1)
def test_a_client_that_never_trains_is_evaluated_as_if_it_had(make, model, gate, tmp_path):
    of_clusters = make is algorithms.FineTunedCluster
    shared = "global_experts.*" if of_clusters else "global_expert.*"
    epochs = Train(max_epochs=0 if of_clusters else 3)  # with which the first cluster would become the best
    losses = []
    for algorithm in (failing(make(), 0, range(2)), make()):
        phases = [
            phase("FedAvg", algorithms.FedAvg(shared, shared), gate=gate, train=epochs),
            Phase("last", algorithm, rounds=2, train=Train(max_epochs=0), gate=gate),
        ]
        fed = run(phases, model(), blobs((13, 8, 11), validation_fraction=0.2), tmp_path / str(len(losses)))
        losses.append(fed.run.states["last"].evaluations[-1].clients[0].validation_loss)
    assert losses[0] == losses[1]
    if of_clusters:
        used = fed.client_module("last", 0).global_experts[0].classifier[1].weight
        first = fed.run.states["FedAvg"].server["global_experts.0.classifier.1.weight"]
        assert not torch.equal(used, first), "its best cluster is not the first one"


@pytest.mark.parametrize(
    ("make", "model", "follower"),
    [
        (algorithms.FineTunedCluster, lambda: clustered(gate=only(0), seed=5), algorithms.ClusterMixture()),
        (algorithms.LabelPrior, lambda: mixture(GlobalOnly()), algorithms.FedAvg("global_expert.*")),
    ],
)
@pytest.mark.few(1)
def test_dropout_is_refused_where_a_phase_starts_from_what_a_client_that_dropped_out_does_not_have(
    make, model, follower, tmp_path
):
    shared = "global_experts.*" if make is algorithms.FineTunedCluster else "global_expert.*"
    none = Train(max_epochs=0)
    phases = [Phase("FedAvg", algorithms.FedAvg(shared, shared), train=none), Phase("own", make(), train=none)]
    later = Phase("later", follower, train=none, start="own")
    failures = ClientFailures(dropout=0.5)
    run(phases, model(), blobs(), tmp_path / "last", failures=failures)
    run([*phases, later], model(), blobs(), tmp_path / "without dropout")
    with pytest.raises(MisconfigurationException, match=r"failures\.dropout is 0\.5, but must be 0, because .* 'own'"):
        run([*phases, later], model(), blobs(), tmp_path / "with", failures=failures)
