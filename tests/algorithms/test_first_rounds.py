"""What a client draws, chooses or computes in its own first round, whenever that is, and if it never has one."""

import pytest
import torch
from helpers import Embedding, Expert, blobs, mixture, run, small_expert
from helpers.clusters import clustered, only
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import ClientFailures, Parts, Phase, Train
from fedmoe_pl.algorithms import (
    ClusterMixture,
    FedAvg,
    FedMoEDA,
    FineTunedCluster,
    KNNPer,
    LabelPrior,
    PFLMoE,
    PMMoE,
    SpecialistMixture,
)
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
    "ClusterMixture": (ClusterMixture, clusters, "gate."),
    "SpecialistMixture": (SpecialistMixture, expert_mixture, "gate."),
    "PFLMoE": (PFLMoE, expert_mixture, "gate."),
    "interleaved": (lambda: PFLMoE(interleaved=True), expert_mixture, "gate."),
    "PMMoE": (PMMoE, lambda: PooledMoE(Expert(), 3, MLPGate(3, 6)).double(), "gate."),
    "FedMoEDA": (
        lambda: FedMoEDA(shared_init=False),
        lambda: SparseMoE(Embedding(), small_expert(), 2).double(),
        "experts.",
    ),
}


@pytest.mark.parametrize("name", DRAWING)
def test_a_client_draws_in_its_first_round_whichever_that_is_and_keeps_what_it_has(name):
    make, make_module, prefix = DRAWING[name]
    algorithm, module, data = make(), make_module(), blobs()
    data.setup()

    def begun(round, state):
        torch.manual_seed(8)
        client = Client(1, round, 0, copy_module(module), data.train_samples[1], state, data)
        algorithm.client_init(client, {})
        return {
            name: t for name, t in client.module.state_dict().items() if name.startswith(prefix) and "bias" not in name
        }

    initial = {name: tensor for name, tensor in module.state_dict().items() if name.startswith(prefix)}
    drawn = begun(0, {})
    assert drawn and not any(torch.equal(tensor, initial[name]) for name, tensor in drawn.items())
    for round in (1, 5):
        torch.testing.assert_close(begun(round, {}), drawn, rtol=0, atol=0)
        kept = {name: tensor + 1 for name, tensor in drawn.items()}
        torch.testing.assert_close(begun(round, kept), kept, rtol=0, atol=0)


def test_a_gate_that_clients_share_is_drawn_in_the_first_round_alone():
    class Shared(FedAvg):
        parts = Parts(new_gate=True)

    module, data = expert_mixture(), blobs()
    data.setup()
    for round in (0, 1):
        client = Client(1, round, 0, copy_module(module), data.train_samples[1], {}, data)
        Shared().client_init(client, {})
        is_same = torch.equal(client.module.gate.linear.weight, module.gate.linear.weight)
        assert is_same == (round == 1)


def test_a_late_client_draws_its_gate_also_if_it_has_one_of_an_earlier_phase(tmp_path):
    none = Train(max_epochs=0)
    phases = [
        Phase("FedAvg", FedAvg("global_expert.*"), gate=GlobalOnly(), evaluate=False),
        Phase("first", PFLMoE(0.25, interleaved=True), rounds=1, evaluate=False),
        Phase("second", failing(SpecialistMixture(), 1), rounds=2, train=none, start="first", evaluate=False),
    ]
    phases[2].algorithm.missing_start = lambda *arguments: ""
    states = run(phases, expert_mixture(), blobs(), tmp_path, max_epochs=1).run.states
    gates = [
        [states[name].clients[client]["gate.linear.weight"] for name in ("first", "second")] for client in range(3)
    ]
    assert all(not torch.equal(*gate) for gate in gates)
    assert not torch.equal(gates[1][1], gates[0][1])


@pytest.mark.parametrize(
    ("make", "model", "gate"),
    [
        (FineTunedCluster, lambda: clustered(gate=only(0), seed=5), None),
        (lambda: LabelPrior(), lambda: mixture(FeatureGate(6)), GlobalOnly()),
        (lambda: LabelPrior("auto"), lambda: mixture(FeatureGate(6)), GlobalOnly()),
        (lambda: KNNPer(weight=0.5), lambda: mixture(FeatureGate(6)), GlobalOnly()),
    ],
)
@pytest.mark.few(1)
def test_a_client_that_never_trains_is_evaluated_as_if_it_had(make, model, gate, tmp_path):
    found = []
    for algorithm in (failing(make(), 0, range(2)), make()):
        data, module = blobs((13, 8, 11), validation_fraction=0.2), model()
        shared = "global_experts.*" if isinstance(algorithm, FineTunedCluster) else "global_expert.*"
        epochs = 0 if make is FineTunedCluster else 3  # with which the first cluster would become the best
        federated = Phase("FedAvg", FedAvg(shared, shared), gate=gate, evaluate=False, train=Train(max_epochs=epochs))
        last = Phase("last", algorithm, rounds=2, train=Train(max_epochs=0), gate=gate)
        federation = run([federated, last], module, data, tmp_path / str(len(found)))
        found.append(federation.run.states["last"].evaluations[-1].clients[0])
    assert found[0].validation_loss == found[1].validation_loss
    if make is FineTunedCluster:
        used = federation.client_module("last", 0)
        assert not torch.equal(
            used.global_experts[0].classifier[1].weight,
            federation.run.states["FedAvg"].server["global_experts.0.classifier.1.weight"],
        ), "its best cluster is not the first one"


@pytest.mark.parametrize(
    ("make", "model", "follower"),
    [
        (FineTunedCluster, lambda: clustered(gate=only(0), seed=5), ClusterMixture()),
        (LabelPrior, lambda: mixture(GlobalOnly()), FedAvg("global_expert.*")),
    ],
)
@pytest.mark.few(1)
def test_dropout_is_refused_where_a_phase_starts_from_what_a_client_that_dropped_out_does_not_have(
    make, model, follower, tmp_path
):
    shared = "global_experts.*" if make is FineTunedCluster else "global_expert.*"
    none = Train(max_epochs=0)
    phases = [Phase("FedAvg", FedAvg(shared, shared), train=none), Phase("own", make(), train=none)]
    later = Phase("later", follower, train=none, start="own")
    failures = ClientFailures(dropout=0.5)
    run(phases, model(), blobs(), tmp_path / "last", failures=failures)
    run([*phases, later], model(), blobs(), tmp_path / "without dropout")
    with pytest.raises(MisconfigurationException, match=r"failures\.dropout is 0\.5, but must be 0, because .* 'own'"):
        run([*phases, later], model(), blobs(), tmp_path / "with", failures=failures)
