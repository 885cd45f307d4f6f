"""IFCA with exploration and, on its clusters, Adaptive Expert Models: fine-tuned, as an ensemble and in a mixture."""

import functools
import itertools
import math
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    Expert,
    TensorData,
    assert_same_bits,
    blobs,
    client_generator,
    momentum_sgd,
    phase,
    run,
    tensors,
    train_by_hand,
)
from helpers.backends import local_training
from helpers.clusters import GateNet, all_phases, clustered, losses_by_hand, only, tensors_of
from helpers.runs import Notes
from lightning.fabric.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from fedmoe_pl import Federation, Phase, Train
from fedmoe_pl.algorithms import ClusterMixture, EpsilonGreedyIFCA, FedAvg, FineTunedCluster, Local
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.algorithms.fedlease import clusters_of
from fedmoe_pl.algorithms.ifca import cluster_picks
from fedmoe_pl.backends.local_client import begin_client
from fedmoe_pl.callbacks import ClusterMonitor
from fedmoe_pl.callbacks.cluster_monitor import cluster_figure
from fedmoe_pl.models import ClusteredMoE, ConstantGate, GlobalOnly, NetworkGate
from fedmoe_pl.trees import copy_module, load_tree, subtree

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


@pytest.mark.slow
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


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 5.0, 25.0], dtype=torch.float64)])
def test_without_exploration_every_client_picks_the_lowest_loss_on_its_training_samples(weight):
    """In eval mode, and with the weights of classes of the model's own loss."""
    data, picked, without_weights = blobs((13, 8, 11, 30, 25), validation_fraction=0.2), [], []
    for seed in range(8):
        module = clustered(seed=seed, gate=only(0), expert=Expert(dropout=0.5))
        if weight is not None:
            module.criterion = torch.nn.CrossEntropyLoss(weight)
        training = local_training(module, EpsilonGreedyIFCA(epsilon=0.0), data)
        experts = copy_module(module).eval().global_experts
        for client in range(5):
            x, y = (values[data.train_samples[client]] for values in (data.x, data.y))
            losses = [-expert(x).log_softmax(1)[range(len(y)), y] for expert in experts]
            without_weights.append(best_of([each.sum() for each in losses]))
            picked.append(chosen(training, client))
            if weight is None:
                assert picked[-1] == without_weights[-1]
            else:
                assert picked[-1] == best_of([(weight[y] * each).sum() for each in losses])
    assert {*picked} == {0, 1, 2}
    assert weight is None or picked != without_weights, "cross-entropy would choose another cluster"


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


@pytest.mark.slow
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


# Adaptive Expert Models


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


@pytest.mark.slow
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
