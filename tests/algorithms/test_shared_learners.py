"""FedEM and pFedMM, mixtures of shared learners, against two rounds in bare PyTorch, and their limits."""

import copy
from functools import partial

import pytest
import torch
from helpers import assert_same_bits, blobs, phase, run, tensors
from helpers.backends import local_training
from helpers.mixtures_of_learners import RATE, backbone, learners, rounds_by_hand
from helpers.runs import federation
from torch import nn

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedEM, PFedMM
from fedmoe_pl.backends.local_client import begin_client
from fedmoe_pl.phases.participation import sample_cohort

momentum = partial(torch.optim.SGD, lr=RATE, momentum=0.9, weight_decay=0.01)


def of_learners(module):
    """An optimizer for each learner."""
    return [momentum(expert.parameters()) for expert in module.experts]


def of_backbone(module):
    """Three times the rate for the backbone of three learners, with the same decay in a step."""
    of_embedding = momentum(module.embedding.parameters(), lr=3 * RATE, weight_decay=0.01 / 3)
    return [momentum(module.experts.parameters()), of_embedding]


@pytest.mark.few("2", "pFedMM")
@pytest.mark.parametrize(
    ("algorithm", "backbone", "optimizers", "clients_per_round"),
    [(FedEM(), None, of_learners, None), (FedEM(), None, of_learners, 2), (PFedMM(), backbone(), of_backbone, None)],
    ids=["all", "2", "pFedMM"],
)
def test_two_rounds_are_those_of_bare_pytorch(algorithm, backbone, optimizers, clients_per_round, tmp_path):
    data, model = blobs(), learners(embedding=backbone, optimizer=momentum)
    it = phase("it", algorithm, rounds=2, clients_per_round=clients_per_round)
    state = run([it], model, data, tmp_path).run.states["it"]
    cohorts = [sample_cohort(range(3), clients_per_round or 3, 0, round) for round in range(2)]
    server, weights = rounds_by_hand(model, data, cohorts, 2, optimizers)
    torch.testing.assert_close(state.server, server, rtol=0, atol=1e-10)
    assert state.clients.keys() == weights.keys()
    for client, expected in weights.items():
        assert state.clients[client].keys() == {"gate.weights"}
        torch.testing.assert_close(state.clients[client]["gate.weights"], expected, rtol=0, atol=1e-10)
        assert (expected - 1 / 3).abs().max() > 1e-3


def test_a_client_predicts_with_its_mixture_of_probabilities_and_sends_the_learners_only(tmp_path):
    data = blobs()
    federation = run([Phase("FedEM", FedEM(), rounds=3)], learners(), data, tmp_path)
    state, x = federation.run.states["FedEM"], data.x[data.global_test]
    for client in range(3):
        pi = state.clients[client]["gate.weights"]
        assert abs(pi.sum().item() - 1) < 1e-12
        module = federation.client_module("FedEM", client).eval()
        expected = sum(weight * expert(x).softmax(1) for weight, expert in zip(pi, module.experts, strict=True))
        torch.testing.assert_close(module(x).exp(), expected)
        shown = federation.results["FedEM"].clients[client].gate_weights
        torch.testing.assert_close(shown, pi.expand_as(shown))
    size = sum(tensor.nbytes for name, tensor in tensors(learners()).items() if name.startswith("experts."))
    assert state.traffic["bytes_up"] == state.traffic["bytes_down"] == 3 * 3 * size
    assert all(name.startswith("experts.") for name in state.server)


def test_dropout_is_active_in_the_m_step_only():
    """The responsibilities are those of the E step, and every call of the loss draws other masks."""
    expert = nn.Sequential(nn.Dropout(0.5), nn.Linear(5, 3))
    training, data = local_training(learners(expert=expert), FedEM(), blobs()), blobs()
    client, constants, samples = begin_client(
        training, copy.deepcopy(training.module), FedEM().server_init(training.module), 0, {}, 0
    )
    (batch,) = data.batches(samples, batch_size=100)
    losses = [FedEM().client_loss(client.module.train(), batch, constants).item() for _ in range(2)]
    assert losses[0] != losses[1] and client.module.training and client.module.experts[0][0].training
    for layer in client.module.modules():
        if isinstance(layer, nn.Dropout):
            layer.p = 0.0
    before = FedEM().client_loss(client.module, batch, constants)
    again = copy.deepcopy(client.module).eval()
    torch.testing.assert_close(FedEM().client_loss(again, batch, constants), before)


def test_learners_with_batch_normalization_change_their_statistics_in_the_m_step_only(tmp_path):
    expert = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    federation = run([phase("FedEM", FedEM(), rounds=2)], learners(expert=expert), blobs((16, 8)), tmp_path)
    batches = federation.run.states["FedEM"].server["experts.1.1.num_batches_tracked"].item()
    assert batches == 2 * 2 * 16 / 4, "two rounds of two epochs of the larger client"


def test_a_newcomer_estimates_its_weights_and_leaves_the_learners_as_they_are(tmp_path):
    data, (first, later) = blobs((9, 6)), [federation(tmp_path, [Phase("FedEM", FedEM(), rounds=3)]) for _ in range(2)]
    first.fit(learners(), blobs())
    later.personalize(learners(), data, str(first.run_dir / "checkpoints/last.ckpt"), rounds=10)
    for client in (0, 1):
        module = later.client_module("FedEM", client).eval()
        assert_same_bits(tensors(module, "experts."), first.run.states["FedEM"].server)
        x, y = data.x[data.train_samples[client]], data.y[data.train_samples[client]]
        likelihood = torch.stack([expert(x).softmax(1)[range(len(y)), y] for expert in module.experts], 1).detach()
        pi = torch.full((3,), 1 / 3, dtype=torch.float64)
        for _ in range(10):
            pi = (pi * likelihood / (likelihood @ pi)[:, None]).mean(0)
        torch.testing.assert_close(module.gate.weights, pi, rtol=0, atol=1e-10)
