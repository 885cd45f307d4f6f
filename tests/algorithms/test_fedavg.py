"""FedAvg against closed forms and bare loops."""

import copy

import pytest
import torch
from helpers import (
    OneWeight,
    PureOneWeight,
    blobs,
    client_generator,
    mixture,
    momentum_sgd,
    phase,
    run,
    tensors,
    train_by_hand,
    two_quadratics,
)
from helpers.quadratics import STEPS, fixed_point

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.models import FeatureGate
from fedmoe_pl.trees import load_tree


@pytest.mark.few("samples-sizes1-PureOneWeight")
@pytest.mark.parametrize("module", [PureOneWeight, OneWeight])
@pytest.mark.parametrize("sizes", [(1, 1), (3, 1)])
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_fedavg_on_two_quadratics_is_at_the_closed_form_after_any_number_of_rounds(module, sizes, weighting, tmp_path):
    samples = torch.tensor(sizes).double()
    shares = samples / samples.sum() if weighting == "samples" else torch.tensor([0.5, 0.5]).double()
    limit, remains = fixed_point(shares)
    for rounds in (1, 5):
        algorithm = FedAvg(weighting=weighting)
        federation = run([phase("FedAvg", algorithm, rounds=rounds)], module(), two_quadratics(sizes), tmp_path, STEPS)
        weight = federation.client_module("FedAvg", 0).weight.detach()
        torch.testing.assert_close(weight, limit + remains**rounds * (0 - limit), rtol=1e-13, atol=0)
        assert torch.equal(weight, federation.client_module("FedAvg", 1).weight)


SHARED = "global_expert."


@pytest.mark.few("samples")
@pytest.mark.parametrize("weighting", ["samples", "uniform"])
def test_partial_sharing_equals_a_bare_loop_that_averages_the_shared_part_and_keeps_the_rest(tmp_path, weighting):
    datamodule, model = blobs(), mixture(FeatureGate(6))
    algorithm = FedAvg(shared="global_expert.*", weighting=weighting)
    federation = run([phase("FedAvg", algorithm, rounds=2)], model, datamodule, tmp_path, seed=5)

    clients = [copy.deepcopy(model) for _ in range(3)]
    weights = [len(samples) if weighting == "samples" else 1 for samples in datamodule.train_samples]
    server = copy.deepcopy(tensors(model, SHARED))
    for round in range(2):
        for client, module in enumerate(clients):
            load_tree(module, server)
            generator = client_generator(5, client, round)
            batches = datamodule.batches(datamodule.train_samples[client], generator=generator)
            train_by_hand(module, "", batches, momentum_sgd, max_epochs=2)
        server = {
            name: sum(w * tensors(module)[name] for w, module in zip(weights, clients, strict=True)) / sum(weights)
            for name in server
        }
    for client, module in enumerate(clients):
        expected = {**module.state_dict(), **server}
        actual = federation.client_module("FedAvg", client).state_dict()
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-13)
    private = [federation.client_module("FedAvg", client).local_expert.classifier[1].weight for client in range(3)]
    assert not torch.equal(private[0], private[1]) and not torch.equal(private[1], private[2])
    assert set(federation.run.states["FedAvg"].server) == set(server)
    kept = federation.run.states["FedAvg"].clients
    assert {name for tree in kept.values() for name in tree} == set(model.state_dict()) - set(server)
