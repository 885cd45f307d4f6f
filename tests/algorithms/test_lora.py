"""FedIT, FFA-LoRA and FedSA-LoRA, which are FedAvg with patterns, against closed forms and plain tensors."""

from functools import partial

import pytest
import torch
from helpers import assert_same_bits, blobs, phase, run, tensors
from helpers.adapted import LAYERS, A, B, adapted, factors, of_client, products, trained, weights_of
from helpers.bare import COHORTS, SEED

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import StackedBackend, TrainerBackend

SIZES = [13, 8, 11]
OF_A, OF_B = "global_expert.*lora_A*", "global_expert.*lora_B*"


@pytest.mark.parametrize(("weights", "expected"), [((1, 1), [[1, 1], [1, 1]]), ((1, 3), [[0.5, 1.5], [0.75, 2.25]])])
def test_fedit_is_the_product_of_means(weights, expected):
    """2 B A of A1 = (1, 0), B1 = (1, 0)', A2 = (0, 1), B2 = (1, 2)'."""
    one, other = of_client([[1, 0]], [[1], [0]], weights[0]), of_client([[0, 1]], [[1], [2]], weights[1])
    mean = FedAvg("global_expert.*").combine(one, other).sent
    torch.testing.assert_close(2 * mean[B("first")] @ mean[A("first")], torch.tensor(expected).double(), rtol=0, atol=0)


def test_ffa_trains_and_shares_b_alone_whose_mean_is_exact_for_the_product(tmp_path):
    data, start = blobs(SIZES), adapted()
    state = run([phase("it", FedAvg(OF_B, OF_B))], adapted(), data, tmp_path, seed=SEED).run.states["it"]
    assert {*state.server} == {B(layer) for layer in LAYERS} and not any(map(dict, state.clients.values()))
    sent = []
    for client in range(3):
        frozen = [(a, b) for a, b in factors(start.state_dict())]
        sent.append(trained(weights_of(start), frozen, data, client, 0, frozen_a=True))
    mean = products({**start.state_dict(), **state.server})
    for layer in range(2):
        exact = sum(n * own[layer][1] @ own[layer][0] for n, own in zip(SIZES, sent, strict=True)) / sum(SIZES)
        torch.testing.assert_close(mean[layer], exact, rtol=0, atol=1e-12)
        assert exact.abs().max() > 0.01


def test_ffa_with_twice_the_scaling_and_a_quarter_of_the_learning_rate_has_half_of_b(tmp_path):
    """With SGD, B's gradient and hence its step are proportional to the scaling; powers of two round nothing."""
    states = []
    for scaling, rate in ((2.0, 0.1), (4.0, 0.025)):
        model = adapted(scaling=scaling, optimizer=partial(torch.optim.SGD, lr=rate))
        it = phase("it", FedAvg(OF_B, OF_B), rounds=2)
        states.append(run([it], model, blobs(SIZES), tmp_path, backend=TrainerBackend()).run.states["it"].server)
    assert_same_bits({name: 2 * tensor for name, tensor in states[1].items()}, states[0])
    assert all(tensor.any() for tensor in states[0].values())


@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend()])
def test_fedsa_averages_a_and_every_client_keeps_the_b_that_it_trained(backend, tmp_path):
    data, start = blobs(SIZES), adapted()
    mean, kept = factors(start.state_dict()), {}
    for round, cohort in enumerate(COHORTS):
        sent = {}
        for client in cohort:
            own_b = kept.get(client, [b for _, b in factors(start.state_dict())])
            pairs = [(a, b) for (a, _), b in zip(mean, own_b, strict=True)]
            sent[client] = trained(weights_of(start), pairs, data, client, round)
            kept[client] = [b for _, b in sent[client]]
        total = sum(SIZES[client] for client in cohort)
        mean = [(sum(SIZES[c] * sent[c][i][0] for c in cohort) / total, None) for i in range(2)]
    fedsa = phase("it", FedAvg(OF_A, "global_expert.*"), rounds=3, clients_per_round=2)
    federation = run([fedsa], adapted(), data, tmp_path, seed=SEED, backend=backend)
    state = federation.run.states["it"]
    assert {*state.server} == {A(layer) for layer in LAYERS}
    for i, layer in enumerate(LAYERS):
        torch.testing.assert_close(state.server[A(layer)], mean[i][0], rtol=0, atol=1e-12)
        for client in range(3):
            torch.testing.assert_close(state.clients[client][B(layer)], kept[client][i], rtol=0, atol=1e-12)
    own = [tensors(federation.client_module("it", client), B("second"))[B("second")] for client in range(3)]
    assert not torch.equal(own[0], own[1]) and not torch.equal(own[1], own[2])
