"""Which clients take part in a round."""

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe_pl.rounds.cohort import cohort_size, sample_cohort


@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=60, unique=True),
    st.data(),
    st.integers(0, 2**63),
    st.integers(0, 10**6),
)
@settings(max_examples=100, deadline=None)
def test_a_cohort_is_a_subset_in_order_that_depends_on_seed_and_round_alone(ids, data, seed, round):
    size = data.draw(st.integers(1, len(ids)))
    cohort = sample_cohort(ids, size, seed, round)
    assert len(set(cohort)) == len(cohort) == size
    positions = [ids.index(client) for client in cohort]
    assert positions == sorted(positions)
    random.seed(size)
    np.random.seed(size)
    sample_cohort(ids, size, seed, round + 1)
    assert sample_cohort(ids, size, seed, round) == cohort
    assert [ids[i] for i in sample_cohort(range(len(ids)), size, seed, round)] == cohort


def test_every_client_and_pair_of_clients_is_drawn_equally_often():
    rounds, clients, size = 3000, 6, 2
    cohorts = [sample_cohort(range(clients), size, seed=0, round=round) for round in range(rounds)]
    pairs = np.zeros((clients, clients))
    for first, second in cohorts:
        pairs[first, second] += 1
    drawn = pairs[np.triu_indices(clients, 1)]  # 15 pairs, 200 each; standard deviation 13.7
    assert np.abs(drawn - 200).max() < 55
    assert cohorts != [sample_cohort(range(clients), size, seed=1, round=round) for round in range(rounds)]


@pytest.mark.parametrize(
    ("clients", "clients_per_round", "size"),
    [
        (9, None, 9),
        (100, 7, 7),
        (100, 1, 1),
        (100, 7.0, 7),
        (100, 0.29, 29),
        (100, 0.1, 10),
        (15, 0.1, 1),
        (4, 0.1, 1),
        (19, 0.5, 9),
    ],
)
def test_cohort_size_takes_a_number_a_fraction_rounded_down_or_everybody(clients, clients_per_round, size):
    assert cohort_size(clients, clients_per_round) == size
