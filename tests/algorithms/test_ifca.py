"""IFCA with exploration: initial models, which clusters clients choose, how these are averaged, and when they stop."""

import functools
import itertools
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, TensorData, assert_same_bits, blobs, phase, run
from helpers.backends import local_training
from helpers.clusters import clustered, losses_by_hand, only, tensors_of
from helpers.runs import Notes
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import EpsilonGreedyIFCA, FedAvg
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.algorithms.fedlease import clusters_of
from fedmoe_pl.algorithms.ifca import cluster_picks
from fedmoe_pl.backends.local_client import begin_client
from fedmoe_pl.models import ClusteredMoE, ConstantGate, GlobalOnly
from fedmoe_pl.trees import copy_module, subtree

FIRST = {2: [1.0, 0.0, 0.0], 3: [1.0, 0.0, 0.0, 0.0]}


def chosen(training, client=0, round=0, server=None, module=None) -> int:
    """The cluster that a client picks; a given module is changed, but all that was sent is loaded into it again."""
    server = training.algorithm.server_init(training.module) if server is None else server
    module = copy_module(training.module) if module is None else module
    _, constants, _ = begin_client(training, module, server, client, {}, round)
    return int(constants["cluster"])


def cluster(tree, index) -> dict:
    return {name: tensor for name, tensor in tree.items() if name.startswith(f"global_experts.{index}.")}


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


def servers() -> Notes:
    """Notes the server's state after every round."""
    return Notes(on_round_end=lambda run, phase, round: dict(run.states[phase.name].server))


# Initial models


def two_clusters(seed):
    return clustered(2, expert=Expert(classes=2), seed=seed)


def losses_of_first_cluster(module, data) -> set[bool]:
    """Whether clients choose the first cluster."""
    return {first < second for first, second in (losses_by_hand(module, data, client) for client in range(6))}


def test_initial_models_are_drawn_until_enough_clients_choose_each(tmp_path):
    """The choices are counted by hand; the first draw leaves a cluster without clients."""
    data, watch = conflicting(), servers()
    module = next(
        module
        for seed in range(100)
        if losses_of_first_cluster(module := two_clusters(seed), data) in ({True}, {False})
    )

    def server_of(algorithm, model, folder, **kwargs):
        it = phase("IFCA", algorithm, gate=ConstantGate(FIRST[2]), train=Train(max_epochs=0))
        return tensors_of(run([it], model, data, tmp_path / folder, **kwargs).run.states["IFCA"].server)

    good = EpsilonGreedyIFCA(epsilon=1.0, good_init=0.5)
    server = server_of(good, module, "good", callbacks=[watch])
    drawn = copy_module(module)
    drawn.load_state_dict({**module.state_dict(), **tensors_of(watch.noted[0])})
    losses = [losses_by_hand(drawn, data, client) for client in range(6)]
    assert [first < second for first, second in losses].count(True) == 3
    weights = [expert.classifier[1].weight for m in (module, drawn) for expert in m.global_experts]
    assert len({weight.sum().item() for weight in weights}) == 4, "both models are new, and not equal"
    assert_same_bits(server_of(good, module, "again"), server)
    other = server_of(good, module, "other", seed=1)
    assert not torch.equal(other["global_experts.0.classifier.1.weight"], weights[2]), "draws depend on the seed"
    kept = server_of(good, drawn, "kept")  # models that are good already are not drawn anew
    assert_same_bits(kept, server_of(EpsilonGreedyIFCA(0.0), drawn, "one"))


def test_of_numbers_of_clusters_that_are_as_good_the_lowest_is_taken():
    """Where all clients are as far from each other, each silhouette is 0."""
    assert clusters_of(1 - torch.eye(4, dtype=torch.float64), most=3).max() == 1


class Convolutional(nn.Module):
    """Images of 3x3 pixels to two classes."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4, 2)

    def forward(self, x):
        return self.fc(self.conv(x).flatten(1).tanh())


def test_new_draws_keep_what_clusters_share_and_end_if_no_draw_can_be_good(tmp_path, monkeypatch):
    module = ClusteredMoE(Convolutional(), 2, gate=GlobalOnly(), clusters_share_fc=True)
    images = torch.rand(12, 1, 3, 3)
    data = TensorData(images, torch.arange(12) % 2, torch.arange(12).split(3), batch_size=3)
    good = phase("IFCA", EpsilonGreedyIFCA(good_init=0.5), train=Train(max_epochs=0))
    server = run([good], module, data, tmp_path).run.states["IFCA"].server
    assert torch.equal(server["global_experts.0.fc.weight"], server["global_experts.1.fc.weight"])
    assert not torch.equal(server["global_experts.0.conv.weight"], server["global_experts.1.conv.weight"])

    monkeypatch.setattr("fedmoe_pl.algorithms.ifca._DRAWS", 3)
    one_client = phase("IFCA", EpsilonGreedyIFCA(good_init=0.5), train=Train(max_epochs=0), clients_per_round=1)
    with pytest.raises(MisconfigurationException, match=r"good_init is 0\.5, but must be lower for these data"):
        run([one_client], module, data, tmp_path)


# The choice


def best_of(losses) -> int:
    return min(range(3), key=losses.__getitem__)


def test_without_exploration_every_client_picks_the_lowest_loss_on_its_training_samples():
    data = blobs((13, 8, 11, 30, 25), validation_fraction=0.2)
    picked = set()
    for seed in range(8):
        module = clustered(seed=seed, gate=only(0), expert=Expert(dropout=0.5))  # evaluated in eval mode
        training = local_training(module, EpsilonGreedyIFCA(epsilon=0.0), data)
        for client in range(5):
            assert chosen(training, client) == best_of(losses_by_hand(copy_module(module), data, client))
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
            assert chosen(training, client) == best_of([-(weight[y] * each.log()).sum() for each in likelihoods])
            differs = differs or chosen(training, client) != best_of([-each.log().sum() for each in likelihoods])
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


def test_each_cluster_is_the_weighted_mean_of_those_who_picked_it_and_others_stay():
    """Clients 0 and 2 train copies of cluster 1, client 1 of cluster 2; nobody of cluster 0."""
    data, module, algorithm = blobs((13, 8, 11)), clustered(gate=only(0)), EpsilonGreedyIFCA()
    server, training = algorithm.server_init(module), local_training(module, algorithm, data)
    updates = []
    for client_id, index in ((0, 1), (1, 2), (2, 1)):
        own = copy_module(module)
        client, constants, _ = begin_client(training, own, server, client_id, {}, 0)
        constants["cluster"] = torch.tensor(index)
        with torch.no_grad():
            for parameter in own.global_experts[0].parameters():
                parameter.fill_(10.0 + client_id)
        updates.append(algorithm.client_final(client, constants))
        assert cluster(updates[-1].sent, index) and not cluster(updates[-1].sent, 0) and not updates[-1].state
    new = algorithm.server_update(server, functools.reduce(algorithm.combine, updates))
    assert_same_bits(cluster(new, 0), cluster(server, 0))
    for index, expected in ((1, (13 * 10 + 11 * 12) / 24), (2, 11.0)):
        for tensor in cluster(new, index).values():
            torch.testing.assert_close(tensor, torch.full_like(tensor, expected))
    assert cluster_picks(new).tolist() == [[0, 2, 1]]


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
    watch = servers()
    federation = run([stopping_phase(24, patience=1)], clustered(), validated(), tmp_path, callbacks=[watch])
    per_cluster = sum(tensor.numel() for tensor in cluster(watch.noted[0], 0).values())
    active = [3] + [int(server["clusters/active"].sum()) for server in watch.noted]
    assert active[-1] == 0 and set(active) >= {3, 0} and active == sorted(active, reverse=True)
    rows = federation.run.rows

    def of_rounds(column):
        return [after[column] - before[column] for before, after in itertools.pairwise([{column: 0}, *rows])]

    assert of_rounds("parameters_down") == [3 * per_cluster * number for number in active[:-1]]
    assert of_rounds("parameters_up") == [3 * per_cluster if number else 0 for number in active[:-1]]
    own = rows[0]["bytes_up"] - rows[0]["parameters_up"] * 8
    assert own == 3 * 4 * 8, "a client's message to the server is no parameter, but four numbers of 8 bytes"
    assert active.count(0) == 1 and len(rows) < 24, "the phase ends with its last cluster"
    picks = cluster_picks(federation.run.states["IFCA"].server).sum(1).tolist()
    assert picks == [3 if number else 0 for number in active[:-1]]
    assert federation.results["IFCA"].spread("validation").mean > 0.6
    assert federation.results["IFCA"].selection == "last round"


@pytest.mark.slow
def test_clusters_in_play_at_the_end_get_their_best_weights(tmp_path):
    """With a patience that never runs out, every validated cluster ends with the weights that validated best."""
    watch = servers()
    federation = run([stopping_phase(8, patience=99)], clustered(), validated(), tmp_path, callbacks=[watch])
    server, last = federation.run.states["IFCA"].server, watch.noted[-2]
    assert server["clusters/active"].all()
    best = subtree(server, "clusters/best/")
    assert_same_bits({name: server[name] for name in best}, best)
    restored = any(not torch.equal(last[name], tensor) for name, tensor in best.items())
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
