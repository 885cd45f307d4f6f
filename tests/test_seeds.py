"""Seeds that are derived from others."""

import random

import numpy as np
import pytest
import torch

from fedmoe_pl.seeds import derive_seed, generator_of, named_seed, phase_seed, seed_all, seeded


def test_derived_seeds_differ_for_every_seed_stream_client_and_round():
    few = range(9)
    clients_own = {derive_seed(seed, 0, client, round) for seed in few for client in few for round in few}
    cohorts = {derive_seed(seed, 1, round) for seed in few for round in few}
    splits = {derive_seed(seed, 2, client) for seed in few for client in few}
    assert len(clients_own | cohorts | splits) == 9**3 + 2 * 9**2
    assert all(0 <= seed < 2**63 for seed in clients_own | cohorts | splits)
    assert max(clients_own).bit_length() == 63, "not fewer, of which two are soon the same"


def test_named_seeds_differ_for_every_name_and_order():
    names = [("gate",), ("mode",), ("a", "b"), ("b", "a"), ("ab",), ("ba",)]
    seeds = [named_seed(seed, *each) for each in names for seed in (0, 1)]
    assert len({*seeds}) == 2 * len(names) and named_seed(1, "gate") == seeds[1]


def test_phases_have_other_seeds_and_generators_also_if_their_names_have_one_checksum():
    names = ["plumless", "buckeroo", "FedAvg", "", "0"]
    assert len({phase_seed(seed, name) for seed in (0, 1) for name in names}) == 2 * len(names)
    assert all(0 <= phase_seed(2**200, name) < 2**63 for name in names)
    keys = [("a", "b"), ("ab",), ("a", 1), ("a", 11), ("a1", 1), (2**32, 0), (0, 1), (1, 0), (2**32 + 1,)]
    draws = {tuple(torch.rand(4, generator=generator_of(0, *each)).tolist()) for each in [*keys, *zip(names)]}
    assert len(draws) == len(keys) + len(names)


@pytest.mark.parametrize("seed", [5, 2**63 - 5])
def test_global_generators_are_seeded_and_go_on_where_they_were(seed):
    def draw():
        return torch.rand(1).item(), np.random.rand(), random.random()

    seed_all(seed)
    first, second = draw(), draw()
    seed_all(seed - 1)
    of_other = draw()
    assert all(a != b for a, b in zip(of_other, first, strict=True))
    seed_all(seed)
    assert draw() == first
    with pytest.raises(KeyError), seeded(seed - 1):
        assert draw() == of_other
        raise KeyError
    assert draw() == second


def test_a_generator_depends_on_every_bit_of_its_seed_and_draws_as_others_do():
    def draws(*keys, n=5):
        return torch.randn(n, generator=generator_of(*keys), dtype=torch.float64)

    first = draws(7, 1)
    assert torch.equal(draws(7, 1), first) and not torch.equal(draws(7, 2), first)
    assert all(not torch.equal(draws(7 + 2**bit, 1), first) for bit in range(128))
    many = draws(0, n=100_000)
    assert abs(many.mean()) < 0.02 and abs(many.std() - 1) < 0.01 and (many.diff().abs() > 0).all()
