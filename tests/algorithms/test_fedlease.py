"""FedLEASE against closed forms, a bare rewrite and plain averages of adapters."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from helpers import blobs, phase, run
from helpers.adapters import LAYERS, adapters, logits, stepped
from helpers.bare import round_batches
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.algorithms import FedLEASE
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.algorithms.fedlease import clusters_of, distances
from fedmoe_pl.backends.backend import fold
from fedmoe_pl.models import AdaptiveTokenGate, ClusteredAdapterMoE, EqualWeights, LayerwiseAdapterMoE

pytest.importorskip("peft")
SIZES, PLACES, SEED, EPOCHS = (13, 8, 11, 9, 12), 3, 3, 2
OWN = "global_experts.0."
POINTS = torch.tensor([[1, 0], [1, 0.2], [0, 1], [0.1, 1]], dtype=torch.float64)


def model(gate=None, places=PLACES, **kwargs):
    return adapters(gate, partial(ClusteredAdapterMoE, max_clusters=places), **kwargs)


def uploads(b, names=("layer",)):
    """B of clients, (n, ...), in layers of these names."""
    return {f"{OWN}{name}.lora_B.weight": b for name in names}


# Distances and clusters


def test_the_distances_of_four_clients():
    found = distances(uploads(POINTS), torch.arange(4))
    expected = torch.tensor([0.019419, 1, 0.900496, 0.803884, 0.707286, 0.004963]).double()
    torch.testing.assert_close(found[tuple(torch.triu_indices(4, 4, 1))], expected, atol=1e-6, rtol=0)
    assert clusters_of(found, 4).tolist() == [0, 0, 1, 1]
    two_layers = uploads(POINTS) | uploads(POINTS.flip(0), ["other"])
    assert torch.equal(distances(two_layers, torch.arange(4)), (found + found.flip(0, 1)) / 2)


def silhouette(matrix, labels):
    scores = []
    for i, label in enumerate(labels):
        by_label = {each: [matrix[i][j] for j in range(len(labels)) if labels[j] == each and j != i] for each in labels}
        a = by_label.pop(label)
        b = min(sum(each) / len(each) for each in by_label.values())
        inside = sum(a) / len(a) if a else b  # 0 for a client alone
        scores.append((b - inside) / max(inside, b))
    return sum(scores) / len(scores)


def linkage(matrix, a, b):
    return sum(matrix[i][j] for i in a for j in b) / (len(a) * len(b))


def brute_force(matrix, most):
    """Average linkage from the bottom up, and the first number of clusters with the highest silhouette."""
    groups, found = [[i] for i in range(len(matrix))], {}
    while len(groups) > 1:
        if len(groups) <= most:
            labels = [next(g for g, group in enumerate(groups) if i in group) for i in range(len(matrix))]
            found[len(groups)] = silhouette(matrix, labels), labels
        pairs = [(a, b) for a in range(len(groups)) for b in range(a + 1, len(groups))]
        between = [linkage(matrix, groups[a], groups[b]) for a, b in pairs]
        a, b = pairs[between.index(min(between))]
        groups = [group for g, group in enumerate(groups) if g not in (a, b)] + [groups[a] + groups[b]]
    labels = max(sorted(found.items()), key=lambda item: item[1][0])[1][1]
    first = [*dict.fromkeys(labels)]
    return [first.index(label) for label in labels]


@pytest.mark.parametrize("seed", range(6))
def test_clusters_are_those_of_a_search_by_hand(seed):
    b = torch.randn(7, 3, generator=torch.Generator().manual_seed(seed))
    matrix = distances(uploads(b), torch.arange(7))
    assert clusters_of(matrix, 4).tolist() == brute_force(matrix.tolist(), 4)


@pytest.mark.parametrize(
    ("points", "most", "expected"),
    [
        (POINTS[1:3], 4, [0, 1]),
        (POINTS, 1, [0] * 4),
        (POINTS[:1], 4, [0]),
        (POINTS[:1] * torch.tensor([[1], [2.0]]), 4, [0, 0]),
    ],
)
def test_as_many_clusters_as_clients_and_only_one(points, most, expected):
    assert clusters_of(distances(uploads(points), torch.arange(len(points))), most).tolist() == expected


# The server


def uploaded(client, a, b):
    tensors = {f"{OWN}layer.lora_A.weight": a, f"{OWN}layer.lora_B.weight": b, "gate.routers.layer.weight": a}
    sent = {f"uploads/tensors/{name}": torch.tensor([value], dtype=torch.float64) for name, value in tensors.items()}
    return Update(sent | {"uploads/ids": torch.tensor([client])}, 1)


def server_of(*updates, places=2):
    algorithm = FedLEASE()
    server = {f"global_experts.{place}.layer.lora_{f}.weight": torch.zeros(2) for place in range(places) for f in "AB"}
    return algorithm.server_update(server, fold(algorithm, [*updates]))


def test_a_client_gets_its_own_cluster_first_and_one_outside_of_the_clusters_the_largest():
    a, b = [[1.0, 0], [3, 0], [0, 5], [0, 7], [0, 9]], [*POINTS, POINTS[2]]
    server = server_of(*(uploaded(i, a[i], b[i].tolist()) for i in (2, 0, 4, 3, 1)))
    known_to_all = {name: each for name, each in server.items() if "clients/" not in name}
    for held, client, own, other in (
        (server, 1, [2.0, 0], [0, 7.0]),
        (server, 3, [0, 7.0], [2.0, 0]),
        (known_to_all, 1, [0, 7.0], [2.0, 0]),
    ):
        sent = FedLEASE().server_send(held, client, {})
        assert sent["gate.num_clusters"] == 2
        assert sent[f"{OWN}layer.lora_A.weight"].tolist() == own == sent["gate.routers.layer.weight"].tolist()
        assert sent["global_experts.1.layer.lora_A.weight"].tolist() == other


def test_with_equal_b_there_is_one_cluster_of_the_means():
    a = [[1.0, 0], [3, 0], [0, 5]]
    server = server_of(*(uploaded(i, a[i], [2.0, 1.0]) for i in range(3)))
    sent = FedLEASE().server_send(server, 1, {})
    assert sent["gate.num_clusters"] == 1
    torch.testing.assert_close(sent[f"{OWN}layer.lora_A.weight"], torch.tensor(a).double().mean(0))
    assert sent[f"{OWN}layer.lora_B.weight"].tolist() == [2.0, 1.0]
    assert not any(name.startswith("global_experts.1") for name in sent)


def test_what_the_server_sends_replaces_what_a_client_has_kept_since_it_missed_the_end_of_the_warm_up():
    server = server_of(*(uploaded(i, [float(i), 0], [2.0, 1.0]) for i in (0, 2)))
    client = SimpleNamespace(id=1, state={f"{OWN}layer.lora_A.weight": torch.ones(2), "head.bias": torch.ones(1)})
    own = FedLEASE().personal_tensors(client, server)
    assert own[f"{OWN}layer.lora_A.weight"].tolist() == [1.0, 0.0] and own["head.bias"] == 1
    client.module, kept, sent = model(), model(seed=1).state_dict(), model(seed=2).state_dict()
    client.state = {name: tensor for name, tensor in kept.items() if name.startswith((OWN, "base.0."))}
    FedLEASE().client_init(client, {name: tensor for name, tensor in sent.items() if name.startswith(OWN)})
    loaded = client.module.state_dict()
    assert torch.equal(loaded[f"{OWN}0.lora_A.weight"], sent[f"{OWN}0.lora_A.weight"])
    assert torch.equal(loaded["base.0.weight"], kept["base.0.weight"])


def test_b_of_zeros_is_refused(tmp_path):
    module = model()
    for expert in module.global_experts:
        for layer in LAYERS:
            expert.get_submodule(layer).lora_B.weight.data.zero_()
    with pytest.raises(MisconfigurationException, match=r"B of .* of client 0 is 0 after the warm-up"):
        run([phase("it", FedLEASE(1))], module, blobs(SIZES), tmp_path, max_epochs=0)


# Whole runs


def weigh(state, clusters):
    """The weights of the experts in a layer: the largest K of 2 K - 1 shares, those of the own expert added."""

    def weights(layer, h):
        rows = state[f"gate.routers.{layer}.weight"]
        used = torch.cat((rows[:clusters], rows[PLACES : PLACES + clusters - 1]))
        p = (h @ used.T).softmax(-1)
        top, places = p.topk(clusters, -1)
        top = top / top.sum(-1, keepdim=True)
        found = [[h.new_zeros(()) for _ in range(PLACES)] for _ in h]
        for sample in range(len(h)):
            for share, place in zip(top[sample], places[sample].tolist(), strict=True):
                expert = place if place < clusters else 0
                found[sample][expert] = found[sample][expert] + share
        return torch.stack([torch.stack(row) for row in found])

    return weights


def rewritten(module, data, warmup_rounds, rounds):
    """The state of each client after all rounds, with its cluster's expert first, and the clusters."""
    experts = [f"global_experts.{place}" for place in range(PLACES)]
    states = [{name: tensor.detach().clone() for name, tensor in module.state_dict().items()} for _ in SIZES]
    labels = [0] * len(SIZES)
    for round in range(rounds):
        clusters = max(labels) + 1
        warm = round < warmup_rounds
        for client, state in enumerate(states):
            names = (OWN,) if warm else (OWN, "gate.routers.")
            for x, y in round_batches(data, client, round, EPOCHS, SEED):

                def loss(tensors, x=x, y=y, clusters=clusters):
                    return F.cross_entropy(logits(tensors, x, weigh(tensors, clusters), experts), y)

                state = stepped(state, names, loss)
            states[client] = state
        if round + 1 < warmup_rounds:
            continue
        own = [{name: state[name] for name in state if name.startswith((OWN, "gate.routers."))} for state in states]
        if warm:
            rows = [torch.stack([each[f"{OWN}{layer}.lora_B.weight"].flatten() for each in own]) for layer in LAYERS]
            cosines = [F.cosine_similarity(row[:, None], row[None], dim=2) for row in rows]
            labels = brute_force((1 - sum(cosines) / len(LAYERS)).tolist(), PLACES)
        means = []
        for label in range(max(labels) + 1):
            members = [each for each, its_label in zip(own, labels, strict=True) if its_label == label]
            means.append({name: torch.stack([each[name] for each in members]).mean(0) for name in own[0]})
        for label, state in zip(labels, states, strict=True):
            state |= means[label]
            for other, mean in enumerate(means):
                place = {label: 0, 0: label}.get(other, other)
                state |= {
                    name.replace(OWN, f"global_experts.{place}."): mean[name] for name in mean if name.startswith(OWN)
                }
    return states, labels


@pytest.mark.few(1)
@pytest.mark.parametrize("warmup_rounds", [1, 2])
def test_it_is_the_rewrite(tmp_path, warmup_rounds):
    data, rounds = blobs(SIZES), warmup_rounds + 2
    lease = phase("it", FedLEASE(warmup_rounds), rounds=rounds)
    federation = run([lease], model(), data, tmp_path, EPOCHS, seed=SEED)
    states, labels = rewritten(model(), data, warmup_rounds, rounds)
    assert len({*labels}) > 1
    server = federation.run.states["it"].server
    assert server["clients/clusters"].tolist() == labels
    for client, expected in enumerate(states):
        actual = federation.client_module("it", client).state_dict()
        assert actual.pop("gate.num_clusters") == max(labels) + 1
        del expected["gate.num_clusters"]
        torch.testing.assert_close(dict(actual), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("module", [lambda: adapters(kind=LayerwiseAdapterMoE), lambda: model(EqualWeights())])
def test_models_without_places_for_clusters_are_refused(module, tmp_path):
    with pytest.raises(MisconfigurationException, match="a ClusteredAdapterMoE with an AdaptiveTokenGate"):
        run([phase("it", FedLEASE())], module(), blobs(SIZES), tmp_path)


# The gate


@pytest.mark.parametrize("places", [2, 4])
@pytest.mark.parametrize(("values", "expected"), [((1, 0, 2), (1, 0)), ((1, 2, 0), (0.268941, 0.731059))])
def test_the_own_expert_may_be_among_the_largest_several_times(places, values, expected):
    gate = AdaptiveTokenGate()
    gate.fit_to_layers(gate, {"layer": 1}, places)
    gate.num_clusters.fill_(2)
    router = gate.routers.layer.weight.data
    assert router.shape == (2 * places - 1, 1)
    router.fill_(9)  # what is not used
    router[:2, 0], router[places, 0] = torch.tensor(values[:2]).float(), values[2]
    found = gate.weights("layer", torch.ones(1, 1, 1)).flatten()
    torch.testing.assert_close(found, torch.tensor([*map(float, expected), *[0.0] * (places - 2)]), atol=1e-6, rtol=0)
