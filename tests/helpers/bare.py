"""Rounds of three clients, two of which take part, for rewrites of algorithms in plain tensors."""

from functools import partial

import torch

from helpers import client_generator

RATE, SEED = 0.1, 3
COHORTS = [[1, 2], [1, 2], [0, 2]]
"""Clients of three rounds of two of three clients, drawn with `SEED`; one begins in the last round."""
sgd = partial(torch.optim.SGD, lr=RATE)


def round_batches(data, client, round, epochs, seed=SEED):
    """The batches that a client trains on in a round, in order."""
    batches = data.batches(data.train_samples[client], generator=client_generator(seed, client, round))
    return [batch for _ in range(epochs) for batch in batches]
