"""Federated mutual learning against plain PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from helpers import blobs, phase, run, tensors
from helpers.architectures import SIZES, pair, train_bare

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FML
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.models import LocalOnly

ALPHA, BETA = 0.3, 0.8


def kl(student, teacher):
    """Summed over classes in plain arithmetic, with the teacher as a constant."""
    p, q = teacher.detach().softmax(1), student.softmax(1)
    return (p * (p.log() - q.log())).sum(1).mean()


def mutual(meme, private, x, y):
    z, m = private(x), meme(x)
    return ALPHA * F.cross_entropy(z, y) + (1 - ALPHA) * kl(z, m) + BETA * F.cross_entropy(m, y) + (1 - BETA) * kl(m, z)


@pytest.mark.few(1)
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("hidden", [(6,), (4, 7)])
def test_two_rounds_are_those_of_plain_pytorch(tmp_path, hidden, weighting):
    data = blobs(SIZES)
    fml = phase("FML", FML(ALPHA, BETA, weighting=weighting), rounds=2)
    fed = run([fml], pair(hidden=hidden), data, tmp_path, max_epochs=2, backend=TrainerBackend())
    start, weights = pair(hidden=hidden).state_dict(), SIZES if weighting == "samples" else (1, 1, 1)
    server, kept = tensors(pair(hidden=hidden), "global_expert."), [start] * 3
    for round in range(2):
        kept = [
            train_bare(client, round, {**kept[client], **server}, data, mutual, epochs=2, hidden=hidden)
            for client in range(3)
        ]
        server = {
            name: sum(w * one[name] for w, one in zip(weights, kept, strict=True)) / sum(weights) for name in server
        }
    state = fed.run.states["FML"]
    torch.testing.assert_close(state.server, server, rtol=0, atol=1e-12)
    for client in range(3):
        own = {name: tensor for name, tensor in kept[client].items() if name not in server}
        torch.testing.assert_close(dict(state.clients[client]), own, rtol=0, atol=1e-12)


def test_clients_are_evaluated_with_their_private_models(tmp_path):
    fed = run([Phase("FML", FML(), gate=LocalOnly())], pair(), blobs(SIZES), tmp_path)
    data, result = fed.run.datamodule, fed.results["FML"]
    assert result.model == "local expert"
    for client in range(3):
        logits = fed.client_module("FML", client).local_expert[client % 2](data.x[data.global_test])
        right = (logits.argmax(1) == data.y[data.global_test]).double().mean().item()
        assert result.clients[client].global_test == pytest.approx(right, abs=1e-6)
