"""FedIT, FFA-LoRA and FedSA-LoRA, which are FedAvg with patterns, against closed forms and plain tensors."""

import pytest
import torch
from helpers import blobs, phase, run, tensors
from helpers.adapted import LAYERS, A, B, adapted, factors, products, trained, weights_of
from helpers.bare import COHORTS, SEED

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import StackedBackend, TrainerBackend

SIZES = [13, 8, 11]
OF_A, OF_B = "global_expert.*lora_A*", "global_expert.*lora_B*"


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


@pytest.mark.few(1)
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
