"""IFCA with exploration: which clusters clients choose, how these are averaged, and when they go out of play."""

import itertools
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, TensorData, assert_same_bits, blobs, run
from helpers.clusters import FIRST, Watch, chosen, cluster, clustered, conflicting, local_training, losses_by_hand, only
from torch import nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import EpsilonGreedyIFCA, FedAvg
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.algorithms.ifca import cluster_picks
from fedmoe_pl.backends.local_client import begin_client
from fedmoe_pl.models import ConstantGate
from fedmoe_pl.trees import copy_module

# The choice


def test_without_exploration_every_client_picks_the_lowest_loss_on_its_training_samples():
    data = blobs((13, 8, 11, 30, 25), validation_fraction=0.2)
    picked = set()
    for seed in range(8):
        module = clustered(seed=seed, gate=only(0), expert=Expert(dropout=0.5))  # evaluated in eval mode
        training = local_training(module, EpsilonGreedyIFCA(epsilon=0.0), data)
        for client in range(5):
            losses = losses_by_hand(copy_module(module), data, client)
            assert chosen(training, client) == min(range(3), key=losses.__getitem__)
            picked.add(chosen(training, client))
    assert picked == {0, 1, 2}


def test_the_lowest_loss_is_that_of_the_model_with_its_weights_of_classes():
    data, weight = blobs((13, 8, 11, 30, 25)), torch.tensor([1.0, 5.0, 25.0], dtype=torch.float64)
    differs = False
    for seed in range(4):
        module = clustered(seed=seed, gate=only(0))
        module.criterion = torch.nn.CrossEntropyLoss(weight)
        training = local_training(module, EpsilonGreedyIFCA(epsilon=0.0), data)
        for client in range(5):
            x, y = (values[data.train_samples[client]] for values in (data.x, data.y))
            likelihoods = [expert(x).softmax(1)[range(len(y)), y] for expert in module.global_experts]
            losses = [-(weight[y] * each.log()).sum() for each in likelihoods]
            assert chosen(training, client) == min(range(3), key=losses.__getitem__)
            differs = differs or chosen(training, client) != max(range(3), key=lambda k: likelihoods[k].log().sum())
    assert differs, "cross-entropy would choose another cluster"


@pytest.mark.few("1.0")
@pytest.mark.parametrize("epsilon", [0.4, 1.0])
def test_with_exploration_every_cluster_is_picked_with_the_probability_of_epsilon_greedy(epsilon):
    module = clustered(gate=only(0))
    data = blobs()
    training = local_training(module, EpsilonGreedyIFCA(epsilon=epsilon), data)
    losses = losses_by_hand(module, data, 1)
    best = min(range(3), key=losses.__getitem__)
    n, server, own = 600, training.algorithm.server_init(module), copy_module(module)
    counts = Counter(chosen(training, 1, round, server, own) for round in range(n))
    for index in range(3):
        p = epsilon / 3 + (1 - epsilon) * (index == best)
        assert abs(counts[index] - n * p) < 4 * math.sqrt(n * p * (1 - p))


def test_ties_are_drawn_and_nan_is_never_the_lowest():
    module = clustered(gate=only(0))
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
    def epsilons(of, rounds=100, **arguments):
        algorithm = EpsilonGreedyIFCA(**arguments)
        return [algorithm.epsilon_of(round, num_clusters=4, rounds=rounds) for round in of]

    assert epsilons([0, 9], epsilon=0.3) == [0.3, 0.3]
    assert epsilons([0, 1, 4], schedule="inverse") == pytest.approx([1, 1 / 2, 1 / 5])
    assert epsilons([0, 3, 8], schedule="by_clusters") == pytest.approx([1, 1 / 2, 1 / 3])  # 1 / sqrt(t + 1)
    # 1 / (t + 1)^b is 1/4 for t = 15 with b = 1/2
    power = {"schedule": "power", "epsilon": 0.25, "decay_rounds": 15}
    assert epsilons([0, 3, 15, 99], **power) == pytest.approx([1, 1 / 2, 1 / 4, 1 / 10])
    # without decay_rounds, round T / 8 has the epsilon: 1/4 for t = 15 of 120, and in between two rounds of 100
    power = {"schedule": "power", "epsilon": 0.25}
    assert epsilons([0, 3, 15, 99], 120, **power) == pytest.approx([1, 1 / 2, 1 / 4, 1 / 10])
    below, above = epsilons([12, 13], 100, **power)
    assert above < 0.25 < below


# Aggregation


def test_each_cluster_is_the_weighted_mean_of_those_who_picked_it_and_others_stay(tmp_path):
    """Clients 0 and 2 train copies of cluster 1, client 1 of cluster 2; nobody of cluster 0."""
    data = blobs((13, 8, 11))
    module = clustered(gate=only(0))
    algorithm = EpsilonGreedyIFCA()
    server = algorithm.server_init(module)
    training = local_training(module, algorithm, data)
    updates, trained = [], []
    for client_id, index in ((0, 1), (1, 2), (2, 1)):
        own = copy_module(module)
        client, constants, _ = begin_client(training, own, server, client_id, {}, 0)
        constants["cluster"] = torch.tensor(index)
        with torch.no_grad():
            for parameter in own.global_experts[0].parameters():
                parameter.fill_(10.0 + client_id)
        update = algorithm.client_final(client, constants)
        assert cluster(update.sent, index) and not cluster(update.sent, 0)
        assert not update.state
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


# Separation


def test_two_groups_with_conflicting_labels_end_at_clusters_of_their_own(tmp_path):
    data = conflicting(test_fraction=0.25)
    federated = Phase("IFCA", EpsilonGreedyIFCA(epsilon=0.0), rounds=5, gate=ConstantGate(FIRST[2]))
    alone = Phase("FedAvg", FedAvg("global_experts.*", "global_experts.0.*"), rounds=5, gate=ConstantGate(FIRST[2]))
    module = clustered(2, ConstantGate(FIRST[2]), expert=Expert(classes=2))
    federation = run([federated, alone], module, data, tmp_path)
    assert cluster_picks(federation.run.states["IFCA"].server)[-1].tolist() == [3, 3]
    weights = [federation.client_module("IFCA", client).global_experts[0].classifier[1].weight for client in range(6)]
    for client in range(6):
        assert torch.equal(weights[client], weights[0]) == (client < 3)
    assert federation.results["IFCA"].spread("local_test").mean > 0.9
    assert federation.results["FedAvg"].spread("local_test").mean < 0.7


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

    two = algorithm.combine(*(stopping_update(0, 1.0, loss, shape) for loss in (0.4, 1.0)))
    best = algorithm.server_update(server, two)["clusters/best_loss"]
    assert best.tolist() == pytest.approx([0.7, math.inf]), "the mean of the two clients that validated it"

    sent_all = len(algorithm.server_send(server, 0, {}))
    # Round t validates what round t - 1 left: values 0 (initial), 1, 2, 3 with losses 0.9, 0.5, 0.6, 0.7.
    for loss, trained in ((0.9, 1.0), (0.5, 2.0), (0.6, 3.0), (0.7, 4.0)):
        assert server["clusters/active"].tolist() == [True, True]
        server = algorithm.server_update(server, stopping_update(0, trained, loss, shape))
    assert server["clusters/active"].tolist() == [False, True]
    assert value(0) == {1.0}, "the model of loss 0.5, not the one that round made of it"
    sent = algorithm.server_send(server, 0, {})
    assert len(sent) == sent_all / 2 and not cluster(sent, 0)

    training = local_training(module, EpsilonGreedyIFCA(epsilon=1.0, patience=2, check_every_n_rounds=1), validated())
    assert {chosen(training, 0, round, server) for round in range(20)} == {1}


def validated(**kwargs) -> TensorData:
    return blobs((40, 30, 50), validation_fraction=0.3, **kwargs)


def stopping_phase(rounds, patience=2, **kwargs) -> Phase:
    algorithm = EpsilonGreedyIFCA(epsilon=0.3, patience=patience, check_every_n_rounds=2)
    return Phase("IFCA", algorithm, rounds=rounds, gate=only(0), train=Train(max_epochs=6), **kwargs)


@pytest.mark.slow
def test_traffic_shrinks_with_every_cluster_out_of_play_and_the_phase_ends_with_the_last_one(tmp_path):
    watch = Watch()
    federation = run([stopping_phase(24, patience=1)], clustered(), validated(), tmp_path, callbacks=[watch])
    per_cluster = sum(tensor.numel() for tensor in cluster(watch.servers[0], 0).values())
    active = [3] + [int(server["clusters/active"].sum()) for server in watch.servers]
    assert active[-1] == 0 and set(active) >= {3, 0} and active == sorted(active, reverse=True)
    rows = federation.run.rows
    down = [rows[0]["parameters_down"]] + [
        b["parameters_down"] - a["parameters_down"] for a, b in itertools.pairwise(rows)
    ]
    assert down == [3 * per_cluster * number for number in active[:-1]]
    up = [rows[0]["parameters_up"]] + [b["parameters_up"] - a["parameters_up"] for a, b in itertools.pairwise(rows)]
    assert up == [3 * per_cluster if number else 0 for number in active[:-1]]
    sizes = [row["bytes_up"] - row["parameters_up"] * 8 for row in rows]
    assert sizes[0] == 3 * 4 * 8, "a client's message to the server is no parameter, but four numbers of 8 bytes"
    assert active.count(0) == 1 and len(rows) < 24, "the phase ends with its last cluster"
    assert cluster_picks(federation.run.states["IFCA"].server).sum(1).tolist() == [
        3 if number else 0 for number in active[:-1]
    ]
    assert federation.results["IFCA"].spread("validation").mean > 0.6
    assert federation.results["IFCA"].selection == "last round"


@pytest.mark.slow
def test_clusters_in_play_at_the_end_get_their_best_weights(tmp_path):
    """With a patience that never runs out, every validated cluster ends with the weights that validated best."""
    watch = Watch()
    federation = run([stopping_phase(8, patience=99)], clustered(), validated(), tmp_path, callbacks=[watch])
    server, last = federation.run.states["IFCA"].server, watch.servers[-2]
    assert server["clusters/active"].all()
    restored = 0
    for number in range(3):
        best = {
            name: tensor
            for name, tensor in server.items()
            if name.startswith(f"clusters/best/global_experts.{number}.")
        }
        for name, tensor in best.items():
            assert torch.equal(server[name.removeprefix("clusters/best/")], tensor)
        restored += any(
            not torch.equal(last[name.removeprefix("clusters/best/")], tensor) for name, tensor in best.items()
        )
    assert restored, "the test would show nothing if the last weights were the best"


def test_a_participant_validates_the_cluster_that_it_picked_as_it_received_it():
    module, data = clustered(gate=only(0)), validated()
    algorithm = EpsilonGreedyIFCA(epsilon=0.0, patience=2, check_every_n_rounds=2)
    training = local_training(module, algorithm, data)
    server = algorithm.server_init(module)
    for round, due in ((0, False), (1, True), (2, False), (3, True)):
        _, constants, _ = begin_client(training, copy_module(module), server, 1, {}, round)
        samples = data.validation_samples[1]
        expert = module.global_experts[int(constants["cluster"])]
        expected = F.cross_entropy(expert(data.x[samples]), data.y[samples]).item()
        assert constants["validation"].tolist() == pytest.approx([expected, 1] if due else [0, 0])
