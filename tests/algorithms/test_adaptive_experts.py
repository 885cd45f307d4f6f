"""Adaptive Expert Models: fine-tuned clusters, the ensemble and the mixture."""

import pytest
import torch
from helpers import Expert, assert_same_bits, blobs, client_generator, momentum_sgd, phase, run, tensors, train_by_hand
from helpers.backends import local_training
from helpers.clusters import GateNet, all_phases, clustered, losses_by_hand, only, tensors_of
from lightning.fabric.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedmoe_pl import Federation, Phase, Train
from fedmoe_pl.algorithms import ClusterMixture, EpsilonGreedyIFCA, FedAvg, FineTunedCluster, Local
from fedmoe_pl.algorithms.ifca import cluster_picks
from fedmoe_pl.backends.local_client import begin_client
from fedmoe_pl.callbacks import ClusterMonitor
from fedmoe_pl.callbacks.cluster_monitor import cluster_figure
from fedmoe_pl.models import NetworkGate
from fedmoe_pl.trees import copy_module, load_tree


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Federation:
    """All phases, with their logs."""
    return run(all_phases(), clustered(), blobs(), tmp_path_factory.mktemp("finished"), logger=True)


def test_the_mixture_has_all_clusters_and_the_client_s_local_expert_and_trains_the_gate_alone(finished):
    server = finished.run.states["IFCA"].server
    clusters = {name: tensor for name, tensor in server.items() if name.startswith("global_experts.")}
    gates = []
    for client in range(3):
        for name in ("Ensemble", "mixture"):
            module = finished.client_module(name, client)
            assert_same_bits(tensors(module, "global_experts."), clusters)
            local = tensors(finished.client_module("Local", client), "local_expert.")
            assert_same_bits(tensors(module, "local_expert."), local)
        gates.append(finished.client_module("mixture", client).gate.network[0].weight)
        assert set(finished.run.states["mixture"].clients[client]) <= {
            name for name in module.state_dict() if name.startswith(("gate.", "local_expert."))
        }
    assert not torch.equal(gates[0], gates[1])
    initial = clustered().state_dict()
    assert any(not torch.equal(clusters[name], initial[name]) for name in clusters)


def test_the_ensemble_s_accuracy_is_that_of_the_sum_of_logits(finished):
    data = blobs()
    x, y = data.x[data.global_test], data.y[data.global_test]
    for client in range(3):
        module = finished.client_module("mixture", client)
        with torch.no_grad():
            total = sum(expert(x) for expert in (*module.global_experts, module.local_expert))
        accuracy = (total.argmax(1) == y).double().mean().item()
        assert finished.results["Ensemble"].clients[client].global_test == pytest.approx(accuracy)


def test_a_client_is_evaluated_with_and_fine_tunes_the_cluster_of_its_lowest_training_loss(tmp_path):
    data = blobs((13, 8, 11, 30, 25))
    phases = all_phases()
    phases[2].train.max_epochs = 0
    tuned = Phase("tuned", FineTunedCluster(), gate=only(0), train=Train(max_epochs=5), start="IFCA")
    federation = run([*phases, tuned], clustered(seed=5), data, tmp_path)
    trained = copy_module(federation.run.model)
    trained.load_state_dict({**trained.state_dict(), **tensors_of(federation.run.states["IFCA"].server)})
    chosen = []
    for client in range(5):
        losses = losses_by_hand(trained, data, client)
        chosen.append(min(range(3), key=losses.__getitem__))
        best = trained.global_experts[chosen[-1]]
        for name in ("IFCA", "Fine-tuned"):
            used = federation.client_module(name, client).global_experts[0]
            assert_same_bits(used.state_dict(), best.state_dict())
        after = federation.client_module("tuned", client)
        assert losses_by_hand(after, data, client)[0] < min(losses)
        assert_same_bits(tensors(after.global_experts[2]), tensors(trained.global_experts[2]))
    assert chosen[0] and 0 in chosen, "client 0 has not the first cluster, and another client has"
    permuted = federation.client_module("IFCA", 0)  # no cluster is lost
    sums = sorted(expert.classifier[1].weight.sum().item() for expert in permuted.global_experts)
    assert sums == sorted(expert.classifier[1].weight.sum().item() for expert in trained.global_experts)


def test_a_client_chooses_its_cluster_once_also_if_it_missed_the_first_round():
    module, data = clustered(gate=only(0), seed=5), blobs()
    losses = losses_by_hand(module, data, 0)
    best, worst = (choice(range(3), key=losses.__getitem__) for choice in (min, max))
    assert best, "or the first cluster would be in the first place anyway"
    training, own = local_training(module, FineTunedCluster(), data), tensors(module.global_experts[worst])
    kept = {f"global_experts.0.{name}": tensor for name, tensor in own.items()}
    for round, state, expected in ((0, {}, best), (2, {}, best), (2, kept, worst)):
        client, _, _ = begin_client(training, copy_module(module), {}, 0, {0: state}, round)
        assert_same_bits(tensors(client.module.global_experts[0]), tensors(module.global_experts[expected]))


def test_a_mixture_of_local_experts_that_nobody_trained_is_refused(tmp_path):
    phases = all_phases()
    phases[1].start = "initial"
    with pytest.raises(MisconfigurationException, match="because no phase trains local_expert"):
        run(phases, clustered(), blobs(), tmp_path)


@pytest.mark.parametrize("frozen_train_mode", [False, True])
@pytest.mark.few(1)
def test_dropout_of_frozen_clusters_is_active_only_if_asked_for(tmp_path, frozen_train_mode):
    """Without dropout, the gate would get the same weights; a bare loop repeats what the clients draw."""
    torch.manual_seed(5)
    gate, data = NetworkGate(GateNet(4)).double(), blobs()
    module = clustered(gate=gate, expert=Expert(dropout=0.5))
    algorithm = ClusterMixture(frozen_train_mode=frozen_train_mode)
    phases = [
        phase("Local", Local("local_expert.*")),
        phase("FedAvg", FedAvg("global_experts.*"), start="Local", train=Train(max_epochs=0)),
        phase("mixture", algorithm, start="FedAvg"),
    ]
    federation = run(phases, module, data, tmp_path)
    for client in range(3):
        expected = copy_module(federation.client_module("Local", client))
        generator = client_generator(0, client, 2)
        expected.gate.reset_parameters()
        for expert in (*expected.global_experts, expected.local_expert):
            expert.train(frozen_train_mode)
        batches = data.batches(data.train_samples[client], generator=generator)
        train_by_hand(expected, "gate.", batches, momentum_sgd, 2, lambda x, y, m=expected: m.loss((x, y))[0])
        actual = federation.client_module("mixture", client)
        torch.testing.assert_close(actual.state_dict(), expected.state_dict(), rtol=1e-10, atol=1e-12)


def test_tensorboard_shows_how_often_each_cluster_was_picked(finished):
    events = EventAccumulator(str(finished.run_dir / "IFCA")).Reload()
    picks = cluster_picks(finished.run.states["IFCA"].server)
    assert picks.shape == (3, 3) and picks.sum(1).tolist() == [2, 2, 2]
    for index in range(3):
        logged = events.Scalars(f"picked/cluster_{index}")
        assert [event.value for event in logged] == picks[:, index].tolist()
        assert [event.step for event in logged] == [1, 2, 3]
    assert events.Tags()["images"].count("picked/all_rounds") == 1
    others = EventAccumulator(str(finished.run_dir / "Local")).Reload()
    assert not [tag for tag in others.Tags()["scalars"] if tag.startswith("picked")]


@pytest.mark.slow
@pytest.mark.parametrize("by_client", [True, False])
def test_tensorboard_shows_the_cluster_of_each_client_beside_its_samples(by_client, tmp_path, monkeypatch):
    """The model that fits a client best is compared with those of the server by hand."""
    drawn = {}

    def figure(method, clusters, num_clusters, counts):
        drawn[method] = clusters, num_clusters
        return cluster_figure(method, clusters, num_clusters, counts)

    monkeypatch.setattr("fedmoe_pl.callbacks.cluster_monitor.cluster_figure", figure)
    data, before = blobs(), phase("Local", Local("local_expert.*"), gate=only(3, 4))
    ifca = Phase("IFCA", EpsilonGreedyIFCA(0.3), gate=only(0, 4), rounds=3, start="Local")
    monitor = ClusterMonitor(by_client)
    federation = run([before, ifca], clustered(), data, tmp_path, logger=True, callbacks=[monitor])
    module = clustered()
    load_tree(module, tensors_of(federation.run.states["IFCA"].server))
    losses = {client: losses_by_hand(module, data, client) for client in range(3)}
    best = {client: of_clusters.index(min(of_clusters)) for client, of_clusters in losses.items()}
    assert drawn == ({"IFCA": (best, 3)} if by_client else {})
    pictures = EventAccumulator(str(federation.run_dir / "IFCA")).Reload().Tags()["images"]
    assert pictures == ["picked/all_rounds", "picked/by_client"][: 1 + by_client]
