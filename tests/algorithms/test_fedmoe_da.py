"""FedMoE-DA: the aggregation matrix, what clients send the server and each other, and whole runs, by hand."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_same_bits, blobs, phase, run, sparse_mixture, tensors
from helpers.backends import exchanged
from lightning.fabric.utilities.exceptions import MisconfigurationException
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from fedmoe_pl import Messages, Phase, Train, Update
from fedmoe_pl.algorithms import FedAvg, FedMoEDA
from fedmoe_pl.algorithms.fedmoe_da import aggregation_matrix, aggregation_rows

N, E = 3, math.e  # clients of blobs()
EMBEDDING, EXPERT, PROXY = 5 * 6 + 6, 6 * 4 + 4 + 4 * 3 + 3, 6  # parameters


# The rows of the aggregation matrix


def test_an_expert_is_averaged_with_the_most_alike_by_a_softmax_of_cosines():
    proxies = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 3.0]], dtype=torch.float64)
    c = math.sqrt(0.5)  # cosine of 45 degrees; rows 0 and 1 are at right angles
    neighbours, weights = aggregation_rows(proxies, top_p=1)
    assert neighbours.tolist() == [[0, 2], [1, 2], [2, 0]]
    expected = torch.tensor([E, math.exp(c)], dtype=torch.float64) / (E + math.exp(c))
    torch.testing.assert_close(weights, expected.expand(3, 2), rtol=1e-11, atol=0)
    neighbours, weights = aggregation_rows(proxies, "all", temperature=0.5)
    assert neighbours.tolist() == [[0, 2, 1], [1, 2, 0], [2, 0, 1]]
    first = torch.tensor([E**2, math.exp(2 * c), 1], dtype=torch.float64)
    last = torch.tensor([E**2, math.exp(2 * c), math.exp(2 * c)], dtype=torch.float64)
    torch.testing.assert_close(weights, torch.stack([r / r.sum() for r in (first, first, last)]), rtol=1e-11, atol=0)


def test_of_equal_cosines_the_first_are_taken_and_the_expert_itself_comes_first():
    """Four clients with the same two proxies: rows 0, 2, 4, 6 are equal, and so are 1, 3, 5, 7."""
    neighbours, weights = aggregation_rows(torch.randn(2, 50).repeat(4, 1), top_p=2)
    alike = [[other for other in range(row % 2, 8, 2) if other != row] for row in range(8)]
    assert neighbours.tolist() == [[row, *alike[row][:2]] for row in range(8)]
    torch.testing.assert_close(weights, torch.full((8, 3), 1 / 3))


def test_other_experts_of_the_own_client_can_be_left_out():
    """The first two experts are of client 0, the last one of client 1."""
    proxies, owners = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64), torch.tensor([0, 0, 1])
    neighbours, weights = aggregation_rows(proxies, "all", owners=owners)
    dense = torch.zeros(3, 3, dtype=torch.float64).scatter(1, neighbours, weights)
    other = 1 / (1 + E)
    expected = [[1 - other, 0, other], [0, 1 - other, other], [1 / (2 + E), 1 / (2 + E), E / (2 + E)]]
    torch.testing.assert_close(dense, torch.tensor(expected, dtype=torch.float64))
    assert aggregation_rows(proxies, 1)[0][0].tolist() == [0, 1]
    assert aggregation_rows(proxies, 1, owners=owners)[0][0].tolist() == [0, 2]


def test_the_matrix_of_the_server_is_dense_again_and_its_rows_add_up_to_1():
    algorithm = FedMoEDA(1, interval=1)
    assert aggregation_matrix({"embedding.w": torch.zeros(1)}) is None
    proxies = {"proxies/1": torch.tensor([[0.0, 1.0]]), "proxies/0": torch.tensor([[1.0, 0.0], [1.0, 0.0]])}
    found = aggregation_matrix(algorithm.server_update({}, Update(proxies, 2)))
    assert found is not None
    other = 1 / (1 + E)
    torch.testing.assert_close(found[0], torch.tensor([[0.5, 0.5, 0], [0.5, 0.5, 0], [other, 0, 1 - other]]))
    assert found[1].tolist() == [0, 0, 1]


# Rounds


def values(*numbers) -> dict:
    """What clients keep, one expert of one parameter each."""
    return {client: {"experts.0.w": torch.tensor([float(number)])} for client, number in enumerate(numbers)}


def federation_by_hand(
    module, data, rounds, interval, top_p, temperature=1.0, similarity="proxies", sync=False, exclude=False
):
    """FedMoE-DA written again in plain PyTorch, with a dense matrix; every epoch is one step on all samples."""
    clients = []
    for client in range(N):
        own = copy.deepcopy(module)
        own.keep_architecture(module.client_architecture(client))
        clients.append(own)
    places = [(own, index) for own in clients for index in range(len(own.experts))]
    held = torch.eye(len(places), dtype=torch.float64)
    for t in range(1, rounds + 1):
        before = [last_layer(own, index) for own, index in places]
        for own, samples in zip(clients, data.train_samples, strict=True):
            optimizer = own.configure_optimizers()
            for _ in range(2):
                optimizer.zero_grad()
                F.cross_entropy(own(data.x[samples]), data.y[samples]).backward()
                optimizer.step()
        new = None
        if (t - 1) % interval == 0:
            new = torch.zeros(len(places), len(places), dtype=torch.float64)
            proxies = [own.gate.proxies[index].weight.detach()[0] for own, index in places]
            if similarity == "updates":
                proxies = [last_layer(*place) - start for place, start in zip(places, before, strict=True)]
            for i, (mine, _) in enumerate(places):
                cosines = {
                    j: F.cosine_similarity(proxies[i], proxies[j], dim=0).item()
                    for j, (other, _) in enumerate(places)
                    if j != i and not (exclude and other is mine)
                }
                nearest = sorted(cosines, key=lambda j: -cosines[j])[: None if top_p == "all" else top_p]
                shares = {i: math.exp(1 / temperature), **{j: math.exp(cosines[j] / temperature) for j in nearest}}
                for j, share in shares.items():
                    new[i, j] = share / sum(shares.values())
        used = new if sync and new is not None else held
        with torch.no_grad():
            flat = torch.stack([nn.utils.parameters_to_vector(own.experts[i].parameters()) for own, i in places])
            for (own, i), mixed in zip(places, used @ flat, strict=True):
                nn.utils.vector_to_parameters(mixed, own.experts[i].parameters())
            mean = torch.stack([nn.utils.parameters_to_vector(own.embedding.parameters()) for own in clients]).mean(0)
            for own in clients:
                nn.utils.vector_to_parameters(mean.clone(), own.embedding.parameters())
        held = held if new is None else new
    return clients


def last_layer(module, index):
    linear = module.experts[index][2]
    return torch.cat([linear.bias, linear.weight.flatten()]).detach()


BY_HAND = {
    "stale": {"interval": 2, "top_p": 2},
    "every round": {"interval": 1, "top_p": 1},
    "sync": {"interval": 2, "top_p": 3, "sync": True},
    "cold": {"interval": 2, "top_p": 2, "temperature": 0.1},
    "updates": {"interval": 2, "top_p": 2, "temperature": 0.3, "similarity": "updates"},
    "others only": {"interval": 2, "top_p": 2, "exclude": True},
    "all": {"interval": 3, "top_p": "all"},
    "all others": {"interval": 1, "top_p": "all", "exclude": True},
}


@pytest.mark.few("stale", "sync")
@pytest.mark.parametrize("name", BY_HAND)
def test_a_federation_gives_what_it_gives_by_hand(name, tmp_path):
    given, num_experts, data = BY_HAND[name], [1, 3, 2], blobs(batch_size=100)
    expected = federation_by_hand(sparse_mixture(num_experts), data, rounds=4, **given)
    arguments = {{"sync": "sync_matrix", "exclude": "exclude_own_client"}.get(key, key): given[key] for key in given}
    federation = run([phase("DA", FedMoEDA(**arguments), rounds=4)], sparse_mixture(num_experts), data, tmp_path)
    for client in range(N):
        found = tensors(federation.client_module("DA", client))
        torch.testing.assert_close(found, tensors(expected[client]), rtol=1e-10, atol=1e-10)
    started = tensors(sparse_mixture(num_experts))
    assert (found["experts.0.0.weight"] - started["experts.0.0.weight"]).abs().max() > 0.01


def test_traffic_is_what_it_is_by_hand(tmp_path):
    """K = 2, all others: updates in rounds 1 and 3, experts mixed from 2 on, with rows of 6 experts."""
    it = phase("DA", FedMoEDA("all", interval=2), rounds=4)
    found = run([it], sparse_mixture(2), blobs(), tmp_path).run.states["DA"].traffic
    rows = 3 * 3 * (2 * N) * 2  # 3 rounds, of a client: client, index and weight of each of 6 experts, for 2 experts
    experts = 3 * N * 2 * (N - 1) * EXPERT  # 3 rounds, of each of 2 clients both experts
    parameters = {"down": N * 4 * EMBEDDING, "up": N * 4 * EMBEDDING, "between_clients": experts}
    values = {"down": N * rows, "up": N * 2 * 2 * PROXY, "between_clients": 0}  # of the algorithm, not the model
    assert found == {
        **{f"parameters_{way}": n for way, n in parameters.items()},
        **{f"bytes_{way}": 8 * (n + values[way]) for way, n in parameters.items()},
    }


def test_an_exchange_of_what_is_not_declared_is_refused():
    algorithm, line = FedMoEDA("all", interval=1, sync_matrix=True), torch.tensor([[1.0, 0.0]])
    algorithm.messages = Messages()
    server = algorithm.server_update({}, Update({"proxies/0": line, "proxies/1": line}, 2))
    sentence = "FedMoEDA: exchange asks for 'experts.0.w' in round 1, but must leave it with its client"
    with pytest.raises(MisconfigurationException, match=re.escape(sentence)):
        exchanged(algorithm, server, values(0, 8), 0)


def test_a_frozen_embedding_from_a_checkpoint_keeps_its_bits_and_is_not_sent(tmp_path):
    pretrained = sparse_mixture(2)
    with torch.no_grad():
        for parameter in pretrained.parameters():
            parameter.add_(1.0)
    given = tmp_path / "embedding.ckpt"
    torch.save({"state_dict": tensors(pretrained, "embedding."), "pytorch-lightning_version": "2.5.0"}, given)
    phases = [
        phase("pretrained", FedAvg("embedding.*"), ckpt_path=str(given)),
        phase("DA", FedMoEDA(1, 2, trainable=["gate.*", "experts.*"]), rounds=3, start="pretrained"),
    ]
    federation = run(phases, sparse_mixture(2), blobs(), tmp_path)
    state = federation.run.states["DA"]
    for client in range(N):
        own = tensors(federation.client_module("DA", client))
        assert_same_bits({n: own[n] for n in own if n.startswith("embedding.")}, tensors(pretrained, "embedding."))
        assert not any(name.startswith("embedding.") for name in state.clients[client])
        assert (own["experts.0.0.weight"] - pretrained.experts[0][0].weight).abs().max() > 0.5, "not from there"
    assert state.traffic["bytes_up"] == 8 * N * 2 * 2 * PROXY  # gates in rounds 1 and 3
    assert state.traffic["bytes_down"] == 8 * N * 2 * 2 * 2 * 3  # rows of 2 experts in rounds 2 and 3
    assert state.traffic["parameters_up"] == state.traffic["parameters_down"] == 0


def test_clients_may_draw_their_own_gate_and_experts(tmp_path):
    algorithm = FedMoEDA(shared_init=False)
    federation = run([phase("DA", algorithm, train=Train(max_epochs=0))], sparse_mixture(2), blobs(), tmp_path)
    first, second = (tensors(federation.client_module("DA", client)) for client in (0, 1))
    for name in first:
        assert torch.equal(first[name], second[name]) == name.startswith("embedding.")


@pytest.mark.slow
def test_tensorboard_shows_the_first_and_the_last_matrix_and_a_curve_of_each_expert_s_use(tmp_path):
    """The share of the clients' own samples that their gates send to it: of those that have it, the mean."""
    it = Phase("DA", FedMoEDA(2, interval=2), rounds=4, train=Train(max_epochs=1))
    fed = run([it], sparse_mixture([3, 2]), blobs(), tmp_path, logger=True)
    log = EventAccumulator(str(fed.run_dir / "DA")).Reload()
    assert sorted(log.Tags()["images"]) == ["used_experts/averaged_with", "used_experts/by_client"]
    assert [image.step for image in log.Images("used_experts/averaged_with")] == [1, 4]
    assert not any("gate" in tag for tag in [*log.Tags()["images"], *log.Tags()["tensors"]])
    assert min(tag for tags in log.Tags().values() if isinstance(tags, list) for tag in tags) == "global_test/mean"
    clients = fed.results["DA"].clients
    for expert in range(3):
        assert len(log.Scalars(f"mean_gate_weight/expert_{expert}")) == 4
        chosen = [c.gate_weights.argmax(dim=1) == expert for c in clients if c.gate_weights.shape[1] > expert]
        (*_, last) = log.Scalars(f"used_experts/expert_{expert}")
        assert last.step == 4
        assert last.value == pytest.approx(sum(c.double().mean().item() for c in chosen) / len(chosen))
