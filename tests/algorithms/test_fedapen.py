"""FedAPEN against plain PyTorch."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from helpers import blobs, phase, run, tensors
from helpers.architectures import SIZES, bare_experts, pair, train_bare

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAPEN
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.models import MixtureWeights
from fedmoe_pl.seeds import derive_seed

FRACTION, WEIGHT_LR, EPOCHS = 0.4, 0.1, 3


def kl(student, teacher):
    p, q = teacher.detach().softmax(1), student.softmax(1)
    return (p * (p.log() - q.log())).sum(1).mean()


def ensemble_loss(w, shared, private, x, y):
    """Both models' losses, each with the other's output as a constant."""
    s, p = shared(x), private(x)
    private_loss = F.cross_entropy(p, y) + kl(p, s) + F.cross_entropy(w * p + (1 - w) * s.detach(), y)
    return private_loss + F.cross_entropy(s, y) + kl(s, p) + F.cross_entropy(w * p.detach() + (1 - w) * s, y)


def split_by_hand(data, client):
    """The adaptability set, of which there is at least one sample, and the others."""
    samples = data.train_samples[client]
    generator = torch.Generator().manual_seed(derive_seed(0, 2, client, 8))
    shuffled = samples[torch.randperm(len(samples), generator=generator)]
    size = max(1, int(FRACTION * len(samples)))
    return shuffled[:size], shuffled[size:]


def learned_by_hand(client, tensors, w, samples, data, hidden, loss=F.cross_entropy):
    """The ensemble's weight after SGD of autograd on the adaptability set."""
    shared, private = bare_experts(client, tensors, hidden).values()
    w = torch.tensor(w, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.SGD([w], lr=WEIGHT_LR)
    for _ in range(EPOCHS):
        for batch in samples.split(4):
            optimizer.zero_grad()
            x, y = data.x[batch], data.y[batch]
            loss(w * private(x).detach() + (1 - w) * shared(x).detach(), y).backward()
            optimizer.step()
            w.data.clamp_(0, 1)
    return w.item()


def used_weight(federation, client):
    """The ensemble's weight in the model that a client would use now."""
    return federation.client_module("it", client).gate.weights[1].item()


@pytest.mark.few(1)
@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend()])
@pytest.mark.parametrize("hidden", [(6,), (4, 7)])
def test_two_rounds_are_those_of_plain_pytorch(tmp_path, hidden, backend):
    data = blobs(SIZES)
    algorithm = FedAPEN(FRACTION, WEIGHT_LR, EPOCHS)
    module = pair(hidden=hidden, gate=MixtureWeights())
    fed = run([phase("it", algorithm, rounds=2)], module, data, tmp_path, max_epochs=2, backend=backend)
    start, weights = pair(hidden=hidden).state_dict(), [0.5] * 3
    server, kept = tensors(pair(hidden=hidden), "global_expert."), [start] * 3
    parts = [split_by_hand(data, client) for client in range(3)]
    for round in range(2):
        kept = [
            train_bare(
                *(client, round, {**kept[client], **server}, data, partial(ensemble_loss, weights[client])),
                samples=parts[client][1],
                epochs=2,
                hidden=hidden,
            )
            for client in range(3)
        ]
        server = {name: sum(one[name] for one in kept) / 3 for name in server}
        trained_with = weights
        weights = [
            learned_by_hand(client, {**kept[client], **server}, weights[client], parts[client][0], data, hidden)
            for client in range(3)
        ]
    state = fed.run.states["it"]
    assert len({0.5, 0.0, 1.0, *weights}) > 4, "several weights inside of the interval"
    torch.testing.assert_close(state.server, server, rtol=0, atol=1e-11)
    for client in range(3):
        own = {name: tensor for name, tensor in kept[client].items() if name not in server}
        own["gate.weights"] = torch.tensor([1 - trained_with[client], trained_with[client]], dtype=torch.float64)
        torch.testing.assert_close(dict(state.clients[client]), own, rtol=0, atol=1e-11)
        assert used_weight(fed, client) == pytest.approx(weights[client], abs=1e-11)


def test_the_weight_is_learned_with_the_loss_of_the_model(tmp_path):
    loss, data = torch.nn.CrossEntropyLoss(torch.tensor([1.0, 5.0, 25.0], dtype=torch.float64)), blobs(SIZES)
    module = pair(gate=MixtureWeights(), loss=loss)
    fed = run([phase("it", FedAPEN(FRACTION, WEIGHT_LR, EPOCHS))], module, data, tmp_path)
    state = fed.run.states["it"]
    for client in range(3):
        tensors, (samples, _) = {**state.clients[client], **state.server}, split_by_hand(data, client)
        w = learned_by_hand(client, tensors, 0.5, samples, data, (4, 7), loss)
        assert used_weight(fed, client) == pytest.approx(w, abs=1e-12)


def test_clients_are_evaluated_with_the_ensemble_of_their_own_weights(tmp_path):
    algorithm = FedAPEN(FRACTION, WEIGHT_LR, EPOCHS)
    fed = run([Phase("it", algorithm, gate=MixtureWeights())], pair(), blobs(SIZES), tmp_path)
    data, result = fed.run.datamodule, fed.results["it"]
    x, y = data.x[data.global_test], data.y[data.global_test]
    found = set()
    for client in range(3):
        module = fed.client_module("it", client)
        w = module.gate.weights[1]
        logits = w * module.local_expert[client % 2](x) + (1 - w) * module.global_expert(x)
        torch.testing.assert_close(module(x), logits, rtol=0, atol=1e-14)
        right = (logits.argmax(1) == y).double().mean().item()
        assert result.clients[client].global_test == pytest.approx(right, abs=1e-6)
        assert result.clients[client].mean_gate_weight == pytest.approx(1 - w.item(), abs=1e-6)
        found.add(w.item())
    assert len(found) == 3 and result.model == "mixture"


def test_the_weight_stays_within_0_and_1(tmp_path):
    fed = run([phase("it", FedAPEN(FRACTION, 1e4, 1))], pair(gate=MixtureWeights()), blobs(SIZES), tmp_path)
    assert {used_weight(fed, client) for client in range(3)} <= {0.0, 1.0}


def test_a_learning_rate_of_0_leaves_the_weights_equal(tmp_path):
    module = pair(gate=MixtureWeights())
    fed = run([phase("it", FedAPEN(FRACTION, weight_lr=0), rounds=2)], module, blobs(SIZES), tmp_path)
    assert {used_weight(fed, client) for client in range(3)} == {0.5}
