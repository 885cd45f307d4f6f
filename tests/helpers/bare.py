"""The expert of `helpers` as plain tensors, and experts with a quadratic loss, for rewrites of algorithms."""

from functools import partial

import torch
import torch.nn.functional as F

from fedmoe_pl.models import GlobalOnly, PersonalizedMoE
from helpers import client_generator, mixture, tensors

RATE, SEED = 0.1, 3
COHORTS = [[1, 2], [1, 2], [0, 2]]
"""Clients of three rounds of two of three clients, drawn with `SEED`; one begins in the last round."""
sgd = partial(torch.optim.SGD, lr=RATE)


def two_experts(optimizer=sgd, gate=None) -> PersonalizedMoE:
    """Two experts of different parameters."""
    return mixture(gate or GlobalOnly(), optimizer=optimizer)


def values(module, expert="global_expert.") -> list:
    """The parameters of an expert, in order: W1, b1, W2, b2."""
    return [*tensors(module, expert).values()]


def of_tree(tree, expert="global_expert.") -> list:
    """The same from a tree of tensors by name."""
    return [tensor for name, tensor in tree.items() if name.startswith(expert)]


def loss(parameters, x, y):
    w1, b1, w2, b2 = parameters
    return F.cross_entropy(torch.tanh(x @ w1.T + b1) @ w2.T + b2, y)


def gradient(parameters, x, y, of=loss) -> list:
    leaves = [tensor.detach().requires_grad_() for tensor in parameters]
    return [*torch.autograd.grad(of(leaves, x, y), leaves)]


def step(parameters, gradient, rate=RATE) -> list:
    return [tensor - rate * slope for tensor, slope in zip(parameters, gradient, strict=True)]


def mixed(a, b, share) -> list:
    """share * a + (1 - share) * b."""
    return [share * one + (1 - share) * other for one, other in zip(a, b, strict=True)]


def mean(lists, weights=None) -> list:
    weights = weights or [1] * len(lists)
    of_each = zip(*lists, strict=True)
    return [sum(w * t for w, t in zip(weights, each, strict=True)) / sum(weights) for each in of_each]


def round_batches(data, client, round, epochs, seed=SEED):
    """The batches that a client trains on in a round, in order."""
    batches = data.batches(data.train_samples[client], generator=client_generator(seed, client, round))
    return [batch for _ in range(epochs) for batch in batches]


def assert_near(actual, expected, tolerance=1e-10):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
