"""FedAvg against closed forms and bare loops."""

import copy

import pytest
import torch
from helpers import (
    OneWeight,
    PureOneWeight,
    assert_same_bits,
    blobs,
    client_generator,
    mixture,
    momentum_sgd,
    phase,
    quadratic,
    run,
    tensors,
    train_by_hand,
    two_quadratics,
)
from helpers.quadratics import STEPS, fixed_point
from torch import nn

from fedmoe_pl.algorithms import FedAvg, Local
from fedmoe_pl.models import ConstantGate, FeatureGate
from fedmoe_pl.phases.participation import sample_cohort
from fedmoe_pl.trees import load_tree


@pytest.mark.few("samples-sizes1-PureOneWeight", "uniform-sizes1-OneWeight")
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


def test_what_a_user_froze_in_a_module_of_their_own_stays_frozen(tmp_path):
    class WithBackbone(OneWeight):
        def __init__(self):
            super().__init__()
            self.backbone = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)

        def training_step(self, batch, batch_idx):
            return quadratic(self.weight * self.backbone, batch[0])

    federation = run([phase("FedAvg", FedAvg(), rounds=2)], WithBackbone(), two_quadratics(), tmp_path, STEPS)
    assert federation.client_module("FedAvg", 0).backbone.item() == 1.0
    limit, remains = fixed_point(torch.tensor([0.5, 0.5]).double())
    expected = limit - remains**2 * limit
    torch.testing.assert_close(federation.client_module("FedAvg", 0).weight.detach(), expected, rtol=1e-13, atol=0)


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


def test_a_client_outside_the_cohort_keeps_its_private_part_of_its_last_round(tmp_path):
    datamodule, model = blobs(), mixture(FeatureGate(6))
    algorithm = FedAvg(shared="global_expert.*")
    states = [
        run([phase("A", algorithm, rounds=rounds, clients_per_round=1)], model, datamodule, tmp_path)
        for rounds in range(1, 5)
    ]
    cohorts = [sample_cohort(range(3), 1, seed=0, round=round) for round in range(4)]
    assert len({client for (client,) in cohorts}) > 1
    for round in range(1, 4):
        for client in range(3):
            before, after = (tensors(states[i].client_module("A", client), "local_expert.") for i in (round - 1, round))
            same = all(torch.equal(before[name], after[name]) for name in before)
            assert same == (client not in cohorts[round])


def test_a_federated_phase_that_starts_from_personal_models_shares_one_model_again(tmp_path):
    datamodule, model = blobs(), mixture(ConstantGate(0.5))
    phases = [phase("Local", Local()), phase("FedAvg", FedAvg(), rounds=2, start="Local")]
    with pytest.warns(UserWarning, match="shares 'global_expert.* the clients of 'Local' have each trained"):
        federation = run(phases, model, datamodule, tmp_path)
    first, second = (federation.client_module("FedAvg", client).state_dict() for client in (0, 1))
    assert_same_bits(first, second)
