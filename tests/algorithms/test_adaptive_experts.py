"""Clusters, exploration, early stopping by cluster, and the mixture of Adaptive Expert Models."""

import csv
import itertools
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, TensorData, assert_same_bits, blobs, momentum_sgd, phase, run, tensors
from lightning.fabric.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from fedmoe_pl import Federation, Phase
from fedmoe_pl.algorithms import ClusterMixture, EpsilonGreedyIFCA, FedAvg, FineTunedCluster, Local
from fedmoe_pl.algorithms.algorithm import Update
from fedmoe_pl.algorithms.ifca import cluster_picks
from fedmoe_pl.backends import LEAN_TRAINER, LocalTraining
from fedmoe_pl.backends.client import begin_client
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.data import Digits, MajorityClasses
from fedmoe_pl.models import ClusteredMoE, ConstantGate, FeatureGate, NetworkGate, SmallMLP
from fedmoe_pl.rounds.checkpoint import load_checkpoint
from fedmoe_pl.rounds.evaluate import predict
from fedmoe_pl.trees import copy_module

FIRST = {2: [1.0, 0.0, 0.0], 3: [1.0, 0.0, 0.0, 0.0]}


class GateNet(nn.Sequential):
    """A gate's network for points."""

    def __init__(self, outputs):
        super().__init__(nn.Linear(5, outputs))


def clustered(num_clusters=3, gate=None, optimizer=momentum_sgd, expert=None, seed=0, **kwargs) -> ClusteredMoE:
    torch.manual_seed(seed)
    return ClusteredMoE(expert or Expert(), num_clusters, gate=gate, optimizer=optimizer, **kwargs).double()


def only(index, experts=4) -> ConstantGate:
    """The gate that is held at one of the experts."""
    return ConstantGate([float(i == index) for i in range(experts)])


def local_training(module, algorithm, datamodule, seed=0) -> LocalTraining:
    initial = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
    trainer = {**LEAN_TRAINER, "accelerator": "cpu"}
    return LocalTraining(module, initial, algorithm, datamodule, trainer, batch_size=None, seed=seed)


def chosen(training, client=0, round=0, server=None, module=None) -> int:
    """The cluster that a client picks; a given module is changed, but all that was sent is loaded into it again."""
    server = training.algorithm.server_init(training.module) if server is None else server
    module = copy_module(training.module) if module is None else module
    _, const, _ = begin_client(training, module, server, client, {}, round)
    return int(const["cluster"])


def losses_by_hand(module, data, client) -> list[float]:
    samples = data.train_samples[client]
    x, y = data.x[samples], data.y[samples]
    return [-expert.eval()(x).log_softmax(1)[range(len(y)), y].mean().item() for expert in module.global_experts]


def cluster(tree, index) -> dict:
    return {name: tensor for name, tensor in tree.items() if name.startswith(f"global_experts.{index}.")}


# The module


def test_the_mixture_is_the_weighted_sum_of_probabilities_with_the_local_expert_last():
    module = clustered(2, gate=NetworkGate(GateNet(3)))
    x = torch.randn(7, 5, dtype=torch.float64)
    scores, weights = module.mix(x)
    expected_weights = F.softmax(module.gate.network(x), dim=1)
    experts = [*module.global_experts, module.local_expert]
    expected = sum(expected_weights[:, [i]] * F.softmax(expert(x), dim=1) for i, expert in enumerate(experts))
    torch.testing.assert_close(weights, expected_weights)
    torch.testing.assert_close(scores.exp(), expected)


def test_all_experts_are_drawn_independently():
    module = clustered(3)
    experts = [*module.global_experts, module.local_expert]
    for name in ("extractor.1.weight", "extractor.1.bias", "classifier.1.weight", "classifier.1.bias"):
        values = torch.cat([expert.get_parameter(name).flatten() for expert in experts])
        assert len(values.unique()) == len(values), name


def test_a_gate_held_at_one_expert_gives_exactly_it_and_computes_no_other():
    module = clustered(3, mixing="logits")
    x = torch.randn(4, 5, dtype=torch.float64)
    alone = [expert(x) for expert in (*module.global_experts, module.local_expert)]
    calls = Counter()
    for index, expert in enumerate((*module.global_experts, module.local_expert)):
        expert.register_forward_hook(lambda *_, index=index: calls.update([index]))
    for index in range(4):
        module.gate = only(index)
        assert torch.equal(module(x), alone[index])
    assert calls == {0: 1, 1: 1, 2: 1, 3: 1}
    module.gate = ConstantGate([0.25, 0.0, 0.75, 0.0])
    torch.testing.assert_close(module(x), 0.25 * alone[0] + 0.75 * alone[2])
    assert calls == {0: 2, 1: 1, 2: 2, 3: 1}


def test_the_ensemble_predicts_the_argmax_of_the_sum_of_logits():
    module = clustered(3, mixing="logits")
    x = torch.randn(50, 5, dtype=torch.float64)
    total = sum(expert(x) for expert in (*module.global_experts, module.local_expert))
    assert torch.equal(module(x).argmax(1), total.argmax(1))
    probabilities = sum(expert(x).softmax(1) for expert in (*module.global_experts, module.local_expert))
    assert not torch.equal(total.argmax(1), probabilities.argmax(1)), "the test could not tell them apart"


class Scale(nn.Module):
    """Has a parameter of its own and no way to draw it anew."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return self.scale * x[:, :3]


WRONG_MODELS = {
    "clusters": (lambda: ClusteredMoE(Expert(), 0), "num_clusters is 0, but must be at least 1"),
    "width": (
        lambda: ClusteredMoE(Expert(), 2, gate=ConstantGate(0.5)),
        "weighs 2 experts, but must weigh 3, the local expert last",
    ),
    "features": (lambda: ClusteredMoE(Expert(), 1, gate=FeatureGate(6)), "FeatureGate, which reads features"),
    "layer": (lambda: ClusteredMoE(Scale(), 2), "Scale, which must have a method reset_parameters"),
    "outputs": (
        lambda: ClusteredMoE(SmallMLP(), 2, SmallMLP(num_classes=7)),
        "7 outputs, but must give 10, as many as global_expert",
    ),
    "network": (
        lambda: ClusteredMoE(SmallMLP(5), 2, gate=NetworkGate(GateNet(5))),
        "weighs 5 experts, but must weigh 3",
    ),
}


@pytest.mark.parametrize("name", WRONG_MODELS)
def test_parts_that_do_not_fit_are_refused(name):
    make, sentence = WRONG_MODELS[name]
    with pytest.raises(MisconfigurationException, match=sentence):
        make()


WRONG_ARGUMENTS = {
    "epsilon": ({"epsilon": 1.5}, "epsilon is 1.5, but must be from 0 to 1"),
    "schedule": ({"schedule": "cosine"}, "schedule is 'cosine', but must be one of constant, inverse"),
    "power": ({"schedule": "power"}, "decay_rounds None; epsilon must be above 0 and decay_rounds at least 1"),
    "patience": ({"patience": 0}, "patience is 0, but must be at least 1"),
    "checks": ({"check_every_n_rounds": 0}, "check_every_n_rounds is 0, but must be at least 1"),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
def test_arguments_out_of_range_are_refused(name):
    arguments, sentence = WRONG_ARGUMENTS[name]
    with pytest.raises(MisconfigurationException, match=sentence):
        EpsilonGreedyIFCA(**arguments)


def test_phases_that_cannot_run_are_refused_before_any_training(tmp_path):
    data = blobs()
    for algorithm, gate, sentence in (
        (EpsilonGreedyIFCA(), None, "must be GlobalOnly"),
        (EpsilonGreedyIFCA(), only(1), "must be GlobalOnly"),
        (
            EpsilonGreedyIFCA(patience=1),
            only(0),
            r"EpsilonGreedyIFCA with these arguments validates, but .*validation_fraction is 0",
        ),
    ):
        with pytest.raises(MisconfigurationException, match=sentence):
            run([phase("IFCA", algorithm, gate=gate, rounds=20)], clustered(), data, tmp_path)


# The choice


def test_without_exploration_every_client_picks_the_lowest_loss_on_its_training_samples():
    data = blobs((13, 8, 11, 30, 25), validation_fraction=0.2)
    picked = set()
    for seed in range(8):
        module = clustered(seed=seed, expert=Expert(dropout=0.5))  # evaluated in eval mode
        training = local_training(module, EpsilonGreedyIFCA(epsilon=0.0), data)
        for client in range(5):
            losses = losses_by_hand(copy_module(module), data, client)
            assert chosen(training, client) == min(range(3), key=losses.__getitem__)
            picked.add(chosen(training, client))
    assert picked == {0, 1, 2}


@pytest.mark.parametrize("epsilon", [0.4, 1.0])
def test_with_exploration_every_cluster_is_picked_with_the_probability_of_epsilon_greedy(epsilon):
    module = clustered()
    data = blobs()
    training = local_training(module, EpsilonGreedyIFCA(epsilon=epsilon), data)
    losses = losses_by_hand(module, data, 1)
    best = min(range(3), key=losses.__getitem__)
    n, server, own = 600, training.algorithm.server_init(module), copy_module(module)
    counts = Counter(chosen(training, 1, round, server, own) for round in range(n))
    for index in range(3):
        p = epsilon / 3 + (1 - epsilon) * (index == best)
        assert abs(counts[index] - n * p) < 4 * math.sqrt(n * p * (1 - p))


def test_the_draw_depends_on_seed_client_and_round_alone():
    module, data, rounds = clustered(), blobs(), range(40)

    def draws(seed, client):
        training = local_training(module, EpsilonGreedyIFCA(epsilon=1.0), data, seed)
        return [chosen(training, client, round) for round in rounds]

    first = draws(0, 0)
    assert draws(0, 0) == first
    assert len(set(first)) == 3
    assert draws(1, 0) != first and draws(0, 1) != first


def test_ties_are_drawn_and_nan_is_never_the_lowest():
    module = clustered()
    for index, expert in enumerate(module.global_experts):
        expert.load_state_dict(module.global_experts[0].state_dict())
        if index == 1:
            nn.init.constant_(expert.classifier[1].bias, math.nan)
    training = local_training(module, EpsilonGreedyIFCA(epsilon=0.0), blobs())
    counts = Counter(chosen(training, 0, round) for round in range(100))
    assert set(counts) == {0, 2} and min(counts.values()) > 25
    nn.init.constant_(module.global_experts[0].classifier[1].bias, math.nan)
    training = local_training(module, EpsilonGreedyIFCA(epsilon=0.0), blobs())
    assert {chosen(training, 0, round) for round in range(20)} == {2}


def test_epsilon_follows_its_schedule():
    def epsilons(rounds, **arguments):
        algorithm = EpsilonGreedyIFCA(**arguments)
        return [algorithm.epsilon_of(round, num_clusters=4) for round in rounds]

    assert epsilons([0, 9], epsilon=0.3) == [0.3, 0.3]
    assert epsilons([0, 1, 4], schedule="inverse") == pytest.approx([1, 1 / 2, 1 / 5])
    assert epsilons([0, 3, 8], schedule="by_clusters") == pytest.approx([1, 1 / 2, 1 / 3])  # 1 / sqrt(t + 1)
    # 1 / (t + 1)^b is 1/4 for t = 15 with b = 1/2
    power = {"schedule": "power", "epsilon": 0.25, "decay_rounds": 15}
    assert epsilons([0, 3, 15, 99], **power) == pytest.approx([1, 1 / 2, 1 / 4, 1 / 10])


# Aggregation


def test_each_cluster_is_the_weighted_mean_of_those_who_picked_it_and_others_stay(tmp_path):
    """Clients 0 and 2 train copies of cluster 1, client 1 of cluster 2; nobody of cluster 0."""
    data = blobs((13, 8, 11))
    module = clustered()
    algorithm = EpsilonGreedyIFCA()
    server = algorithm.server_init(module)
    training = local_training(module, algorithm, data)
    updates, trained = [], []
    for client_id, index in ((0, 1), (1, 2), (2, 1)):
        own = copy_module(module)
        client, const, _ = begin_client(training, own, server, client_id, {}, 0)
        const["cluster"] = torch.tensor(index)
        with torch.no_grad():
            for parameter in own.global_experts[0].parameters():
                parameter.fill_(10.0 + client_id)
        update = algorithm.client_final(client, const)
        assert cluster(update.sent, index) and not cluster(update.sent, 0)
        assert not update.kept
        updates.append(update)
        trained.append(10.0 + client_id)
    a, b, c = updates
    combined = algorithm.combine(algorithm.combine(a, b), c)
    new = algorithm.server_update(server, combined)
    assert_same_bits(cluster(new, 0), cluster(server, 0))
    for tensor in cluster(new, 1).values():  # (13 * 10 + 11 * 12) / 24
        torch.testing.assert_close(tensor, torch.full_like(tensor, 262 / 24))
    for tensor in cluster(new, 2).values():
        assert torch.equal(tensor, torch.full_like(tensor, 11.0))
    assert cluster_picks(new).tolist() == [[0, 2, 1]]
    for order in ((c, algorithm.combine(a, b)), (algorithm.combine(b, c), a), (b, algorithm.combine(c, a))):
        other = algorithm.combine(*order)
        torch.testing.assert_close(other.sent, combined.sent)
        assert other.weight == combined.weight


def test_uniform_weighting_counts_clients():
    algorithm = EpsilonGreedyIFCA(weighting="uniform")
    data, module = blobs((13, 3)), clustered(1, gate=ConstantGate(1.0))
    training, server = local_training(module, algorithm, data), algorithm.server_init(module)
    updates = []
    for client_id in (0, 1):
        own = copy_module(module)
        client, const, _ = begin_client(training, own, server, client_id, {}, 0)
        nn.init.constant_(own.global_experts[0].classifier[1].bias, float(client_id))
        updates.append(algorithm.client_final(client, const))
    new = algorithm.server_update(server, algorithm.combine(*updates))
    assert new["global_experts.0.classifier.1.bias"].tolist() == [0.5] * 3


def mixture_phases(federated: Phase, num_clusters: int, start="Local") -> list[Phase]:
    last = only(num_clusters, num_clusters + 1)
    torch.manual_seed(5)
    gate = NetworkGate(GateNet(1 if num_clusters == 1 else num_clusters + 1)).double()
    return [
        phase("Local", Local("local_expert.*"), gate=last, max_epochs=3),
        federated,
        Phase("mixture", ClusterMixture(), gate=gate, start=federated.name),
    ]


def test_one_cluster_without_exploration_is_fedavg_with_a_mixture_on_top(tmp_path):
    results = []
    for algorithm in (EpsilonGreedyIFCA(epsilon=0.0), FedAvg("global_experts.*", "global_experts.*")):
        federated = Phase("federated", algorithm, rounds=3, clients_per_round=2, gate=ConstantGate(1.0), start="Local")
        expert = Expert(dropout=0.3)  # its draws are those of the clients' training
        module = clustered(1, gate=ConstantGate(0.5), expert=expert)
        results.append(run(mixture_phases(federated, 1), module, blobs(), tmp_path))
    ours, expected = results
    assert_same_bits(cluster(ours.states["federated"].server, 0), cluster(expected.states["federated"].server, 0))
    for client in range(3):
        assert_same_bits(dict(ours.states["mixture"].kept[client]), dict(expected.states["mixture"].kept[client]))
    for name in ("federated", "mixture"):
        assert ours.results[name].spread("global_test") == expected.results[name].spread("global_test")


# What the phases start from


def all_phases(rounds=3) -> list[Phase]:
    torch.manual_seed(5)
    return [
        Phase("Local", Local("local_expert.*"), gate=only(3), max_epochs=3),
        Phase("IFCA", EpsilonGreedyIFCA(0.3), rounds=rounds, clients_per_round=2, gate=only(0), start="Local"),
        Phase("Fine-tuned", FineTunedCluster(), gate=only(0)),
        Phase("Ensemble", ClusterMixture(), gate=ConstantGate([0.25] * 4), mixing="logits", max_epochs=0),
        Phase("mixture", ClusterMixture(), gate=NetworkGate(GateNet(4)).double(), max_epochs=4),
    ]


def test_the_mixture_has_all_clusters_and_the_client_s_local_expert_and_trains_the_gate_alone(tmp_path):
    federation = run(all_phases(), clustered(), blobs(), tmp_path)
    server = federation.states["IFCA"].server
    clusters = {name: tensor for name, tensor in server.items() if name.startswith("global_experts.")}
    gates = []
    for client in range(3):
        for name in ("Ensemble", "mixture"):
            module = federation.client_module(name, client)
            assert_same_bits(tensors(module, "global_experts."), clusters)
            local = tensors(federation.client_module("Local", client), "local_expert.")
            assert_same_bits(tensors(module, "local_expert."), local)
        gates.append(federation.client_module("mixture", client).gate.network[0].weight)
        assert set(federation.states["mixture"].kept[client]) <= {
            name for name in module.state_dict() if name.startswith(("gate.", "local_expert."))
        }
    assert not torch.equal(gates[0], gates[1])
    initial = clustered().state_dict()
    assert any(not torch.equal(clusters[name], initial[name]) for name in clusters)


def test_the_ensemble_s_accuracy_is_that_of_the_sum_of_logits(tmp_path):
    data = blobs()
    federation = run(all_phases(), clustered(), data, tmp_path)
    x, y = data.x[data.global_test], data.y[data.global_test]
    for client in range(3):
        module = federation.client_module("mixture", client)
        with torch.no_grad():
            total = sum(expert(x) for expert in (*module.global_experts, module.local_expert))
        accuracy = (total.argmax(1) == y).double().mean().item()
        assert federation.results["Ensemble"].clients[client].global_test == pytest.approx(accuracy)


def test_a_client_is_evaluated_with_and_fine_tunes_the_cluster_of_its_lowest_training_loss(tmp_path):
    data = blobs((13, 8, 11, 30, 25))
    phases = all_phases()
    phases[2].max_epochs = 0
    tuned = Phase("tuned", FineTunedCluster(), gate=only(0), max_epochs=5, start="IFCA")
    federation = run([*phases, tuned], clustered(), data, tmp_path)
    trained = copy_module(federation.model)
    trained.load_state_dict({**trained.state_dict(), **tensors_of(federation.states["IFCA"].server)})
    for client in range(5):
        losses = losses_by_hand(trained, data, client)
        best = trained.global_experts[min(range(3), key=losses.__getitem__)]
        for name in ("IFCA", "Fine-tuned"):
            used = federation.client_module(name, client).global_experts[0]
            assert_same_bits(used.state_dict(), best.state_dict())
        after = federation.client_module("tuned", client)
        assert losses_by_hand(after, data, client)[0] < min(losses)
        assert_same_bits(tensors(after.global_experts[2]), tensors(trained.global_experts[2]))
    permuted = federation.client_module("IFCA", 0)  # no cluster is lost
    sums = sorted(expert.classifier[1].weight.sum().item() for expert in permuted.global_experts)
    assert sums == sorted(expert.classifier[1].weight.sum().item() for expert in trained.global_experts)


def tensors_of(server) -> dict:
    return {name: tensor for name, tensor in server.items() if name.startswith("global_experts.")}


def test_a_mixture_of_local_experts_that_nobody_trained_is_refused(tmp_path):
    phases = all_phases()
    phases[1].start = "initial"
    with pytest.raises(MisconfigurationException, match=r"nobody has trained the local experts.*Local as `start`"):
        run(phases, clustered(), blobs(), tmp_path)


def test_local_may_come_after_the_clusters(tmp_path):
    before = run(all_phases(), clustered(), blobs(), tmp_path)
    phases = all_phases()
    phases[1].start, phases[0].start = None, "IFCA"
    phases[3].start = phases[4].start = "Local"
    phases = [phases[1], phases[0], *phases[2:]]
    after = run(phases, clustered(), blobs(), tmp_path)
    for name in ("Local", "IFCA", "Fine-tuned", "Ensemble", "mixture"):
        assert after.results[name].clients[0].global_test == before.results[name].clients[0].global_test
    for name in ("Ensemble", "mixture"):
        assert_same_bits(*(f.client_module(name, 2).state_dict() for f in (after, before)))


def test_experts_are_trained_with_the_gate_where_asked_for(tmp_path):
    phases = all_phases()
    phases[-1].algorithm = ClusterMixture("*")
    federation = run(phases, clustered(), blobs(), tmp_path)
    kept = federation.states["mixture"].kept[0]
    assert {".".join(name.split(".")[:2]) for name in kept if name.startswith("global_experts")} == {
        "global_experts.0",
        "global_experts.1",
        "global_experts.2",
    }
    assert set(cluster(federation.states["IFCA"].server, 1)) <= set(kept)


# Separation


def conflicting(**kwargs) -> TensorData:
    """Six clients with the same kind of points; the labels of clients 3 to 5 are swapped."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, 5, generator=generator)
    y = (x[:, 0] > 0).long()
    y[120:] = 1 - y[120:]
    parts = torch.arange(240).split(40)
    data = TensorData(x, y, parts, dtype=torch.float64, batch_size=10, **kwargs)
    data.setup()
    return data


def test_two_groups_with_conflicting_labels_end_at_clusters_of_their_own(tmp_path):
    data = conflicting(test_fraction=0.25)
    federated = Phase("IFCA", EpsilonGreedyIFCA(epsilon=0.0), rounds=8, gate=ConstantGate(FIRST[2]))
    alone = Phase("FedAvg", FedAvg("global_experts.*", "global_experts.0.*"), rounds=8, gate=ConstantGate(FIRST[2]))
    module = clustered(2, expert=Expert(classes=2))
    federation = run([federated, alone], module, data, tmp_path)
    assert cluster_picks(federation.states["IFCA"].server)[-1].tolist() == [3, 3]
    weights = [federation.client_module("IFCA", client).global_experts[0].classifier[1].weight for client in range(6)]
    for client in range(6):
        assert torch.equal(weights[client], weights[0]) == (client < 3)
    assert federation.results["IFCA"].spread("local_test_held_out").mean > 0.9
    assert federation.results["FedAvg"].spread("local_test_held_out").mean < 0.7


# Early stopping by cluster


def stopping_update(cluster_index: int, value: float, loss: float, shape) -> Update:
    """What one client sends: the model with this value everywhere, and the loss of the model that it received."""
    sent = {name: torch.full(size, value, dtype=torch.float64) for name, size in shape(cluster_index).items()}
    sent[f"clusters/tally/{cluster_index}"] = torch.tensor([10.0, 1.0, loss, 1.0], dtype=torch.float64)
    return Update(sent, 10)


def test_a_cluster_goes_out_of_play_with_its_best_weights_as_they_were_validated():
    module = clustered(2, gate=ConstantGate(FIRST[2]))
    algorithm = EpsilonGreedyIFCA(patience=2, check_every_n_rounds=1)
    server = algorithm.server_init(module)

    def shape(index):
        return {name: tensor.shape for name, tensor in cluster(server, index).items()}

    def value(index):
        return {tensor.flatten()[0].item() for tensor in cluster(server, index).values()}

    sent_all = len(algorithm.server_send(server, 0))
    # Round t validates what round t - 1 left: values 0 (initial), 1, 2, 3 with losses 0.9, 0.5, 0.6, 0.7.
    for loss, trained in ((0.9, 1.0), (0.5, 2.0), (0.6, 3.0), (0.7, 4.0)):
        assert server["clusters/active"].tolist() == [True, True]
        server = algorithm.server_update(server, stopping_update(0, trained, loss, shape))
    assert server["clusters/active"].tolist() == [False, True]
    assert value(0) == {1.0}, "the model of loss 0.5, not the one that round made of it"
    sent = algorithm.server_send(server, 0)
    assert len(sent) == sent_all / 2 and not cluster(sent, 0)

    training = local_training(module, EpsilonGreedyIFCA(epsilon=1.0, patience=2, check_every_n_rounds=1), validated())
    assert {chosen(training, 0, round, server) for round in range(20)} == {1}


def validated(**kwargs) -> TensorData:
    return blobs((40, 30, 50), validation_fraction=0.3, **kwargs)


class Watch(FederationCallback):
    """Records the server's state after every round."""

    def __init__(self):
        self.servers = []

    def on_round_end(self, federation, phase, round):
        self.servers.append(dict(federation.states[phase.name].server))


def stopping_phase(rounds, patience=2, **kwargs) -> Phase:
    algorithm = EpsilonGreedyIFCA(epsilon=0.3, patience=patience, check_every_n_rounds=2)
    return Phase("IFCA", algorithm, rounds=rounds, gate=only(0), max_epochs=6, **kwargs)


def test_traffic_shrinks_with_every_cluster_out_of_play_and_nothing_is_trained_without_any(tmp_path):
    watch = Watch()
    federation = run([stopping_phase(24, patience=1)], clustered(), validated(), tmp_path, callbacks=[watch])
    per_cluster = sum(tensor.numel() for tensor in cluster(watch.servers[0], 0).values())
    active = [3] + [int(server["clusters/active"].sum()) for server in watch.servers]
    assert active[-1] == 0 and set(active) >= {3, 0} and active == sorted(active, reverse=True)
    rows = federation.rows
    down = [rows[0]["parameters_down"]] + [
        b["parameters_down"] - a["parameters_down"] for a, b in itertools.pairwise(rows)
    ]
    assert down == [3 * per_cluster * number for number in active[:-1]]
    up = [rows[0]["parameters_up"]] + [b["parameters_up"] - a["parameters_up"] for a, b in itertools.pairwise(rows)]
    assert up == [3 * (per_cluster + 4) if number else 0 for number in active[:-1]]
    for before, after in itertools.pairwise(watch.servers[active.index(0) :]):
        assert_same_bits(tensors_of(after), tensors_of(before))
    assert cluster_picks(federation.states["IFCA"].server).sum(1).tolist() == [
        3 if number else 0 for number in active[:-1]
    ]
    assert federation.results["IFCA"].spread("validation").mean > 0.6


def test_a_participant_validates_the_cluster_that_it_picked_as_it_received_it():
    module, data = clustered(), validated()
    algorithm = EpsilonGreedyIFCA(epsilon=0.0, patience=2, check_every_n_rounds=2)
    training = local_training(module, algorithm, data)
    server = algorithm.server_init(module)
    for round, due in ((0, False), (1, True), (2, False), (3, True)):
        _, const, _ = begin_client(training, copy_module(module), server, 1, {}, round)
        samples = data.validation_samples[1]
        expert = module.global_experts[int(const["cluster"])]
        expected = F.cross_entropy(expert(data.x[samples]), data.y[samples]).item()
        assert const["validation"].tolist() == pytest.approx([expected, 1] if due else [0, 0])


class Stop(FederationCallback):
    def __init__(self, round):
        self.round = round

    def on_round_end(self, federation, phase, round):
        if phase.name == "IFCA" and round == self.round:
            raise KeyboardInterrupt


def test_a_run_that_goes_on_ends_with_the_bits_of_one_that_never_stopped(tmp_path):
    def federation(path, callbacks):
        torch.manual_seed(5)
        phases = [
            phase("Local", Local("local_expert.*"), gate=only(3)),
            stopping_phase(8, patience=1, start="Local", evaluate_every_n_rounds=4),
            Phase("mixture", ClusterMixture(), gate=NetworkGate(GateNet(4)).double()),
        ]
        arguments = {"logger": False, "enable_progress_bar": False, "callbacks": callbacks}
        return Federation(phases, {"max_epochs": 2}, default_root_dir=str(tmp_path / path), **arguments)

    whole = federation("whole", [])
    whole.fit(clustered(), validated())
    with pytest.raises(KeyboardInterrupt):
        federation("parts", [Stop(round=5)]).fit(clustered(), validated())
    resumed = federation("parts", [])
    resumed.fit(clustered(), validated(), ckpt_path="last")
    assert set(whole.states["IFCA"].server["clusters/active"].tolist()) == {False, True}, "nothing was at stake"
    assert_same_bits(resumed.states["IFCA"].server, whole.states["IFCA"].server)
    saved = load_checkpoint(resumed.run_dir / "checkpoints/last.ckpt")["phases"]["IFCA"].server
    assert_same_bits(saved, whole.states["IFCA"].server)
    for client in range(3):
        modules = (f.client_module("mixture", client) for f in (resumed, whole))
        assert_same_bits(*(module.state_dict() for module in modules))
    assert repr(resumed.rows) == repr(whole.rows)  # nan is not equal to itself


# What is reported


def test_tensorboard_shows_how_often_each_cluster_was_picked(tmp_path):
    federation = run(all_phases(), clustered(), blobs(), tmp_path, logger=True)
    events = EventAccumulator(str(federation.run_dir)).Reload()
    picks = cluster_picks(federation.states["IFCA"].server)
    assert picks.shape == (3, 3) and picks.sum(1).tolist() == [2, 2, 2]
    for index in range(3):
        logged = events.Scalars(f"clusters/IFCA/picked_{index}")
        assert [event.value for event in logged] == picks[:, index].tolist()
        assert [event.step for event in logged] == [2, 3, 4]  # Local's round comes before
    assert events.Tags()["images"].count("clusters/IFCA/picks") == 1
    assert not [tag for tag in events.Tags()["scalars"] if tag.startswith("clusters/") and "IFCA" not in tag]


def test_a_client_s_checkpoint_is_a_clustered_mixture_of_its_own(tmp_path):
    data = Digits(num_clients=3, partitioner=MajorityClasses(1.0, 40), batch_size=20)
    phases = [
        phase("Local", Local("local_expert.*"), gate=only(2, 3)),
        Phase("IFCA", EpsilonGreedyIFCA(0.3), gate=only(0, 3), start="Local"),
        Phase("Ensemble", ClusterMixture(), gate=ConstantGate([0.25, 0.25, 0.5]), mixing="logits", max_epochs=0),
    ]
    torch.manual_seed(0)
    module = ClusteredMoE(SmallMLP(hidden_features=8), 2, SmallMLP(hidden_features=6), optimizer=momentum_sgd)
    federation = run(phases, module, data, tmp_path, enable_checkpointing=True)
    for name in ("IFCA", "Ensemble"):
        loaded = ClusteredMoE.load_from_checkpoint(federation.run_dir / f"clients/{name}/client_001.ckpt").eval()
        expected = federation.client_module(name, 1)
        assert_same_bits(loaded.state_dict(), expected.state_dict())
        scores, _ = predict(loaded, data, data.global_test)
        assert torch.equal(scores, predict(expected, data, data.global_test)[0])
        assert loaded.mixing == expected.mixing
    with open(federation.run_dir / "summary.csv") as file:
        assert [row["model"] for row in csv.DictReader(file)] == ["global expert", "mixture"]


def test_fine_tuning_some_clients_is_refused_because_the_others_would_never_choose_a_cluster(tmp_path):
    first = ConstantGate([1.0, 0.0, 0.0])
    phases = [
        phase("IFCA", EpsilonGreedyIFCA(0.0), gate=first),
        phase("Fine-tuned", FineTunedCluster(), gate=first, clients_per_round=1),
    ]
    with pytest.raises(MisconfigurationException, match="clients_per_round is 1, but must be null, because FineTuned"):
        run(phases, ClusteredMoE(Expert(), 2).double(), blobs(), tmp_path)
    assert not list(tmp_path.rglob("version_*"))
