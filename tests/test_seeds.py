"""Seeds that are derived from others."""

import random

import numpy as np
import torch

from fedmoe_pl.seeds import derive_seed, seed_all


def test_derived_seeds_differ_for_every_seed_stream_client_and_round():
    few = range(9)
    clients_own = {derive_seed(seed, 0, client, round) for seed in few for client in few for round in few}
    cohorts = {derive_seed(seed, 1, round) for seed in few for round in few}
    splits = {derive_seed(seed, 2, client) for seed in few for client in few}
    assert len(clients_own | cohorts | splits) == 9**3 + 2 * 9**2
    assert all(0 <= seed < 2**63 for seed in clients_own | cohorts | splits)


def test_seed_all_seeds_torch_numpy_and_python_also_with_a_seed_of_63_bits():
    def draw(seed):
        seed_all(seed)
        return torch.rand(1).item(), np.random.rand(), random.random()

    seed = 2**63 - 5
    first = draw(seed)
    assert draw(seed) == first
    assert all(a != b for a, b in zip(draw(seed - 1), first, strict=True))
