"""Which clients take part in a round."""

import random

import numpy as np
import pytest
import torch
from helpers import TensorData, assert_same_bits, blobs, mixture, phase, run
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg, OptInFedAvg
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models import GlobalOnly
from fedmoe_pl.phases.participation import cohort_size, phase_cohort, sample_cohort


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


def test_cohort_size_takes_a_number_a_share_rounded_down_or_everybody():
    numbers = [(9, None, 9), (100, 7, 7), (100, 1, 1), (100, 1.0, 100), (3, 1.0, 3), (4, 0.1, 1), (15, 0.1, 1)]
    shares = [(100, 0.07, 7), (100, 0.29, 29), (100, 0.1, 10), (182, 0.03, 5), (19, 0.5, 9)]
    for clients, clients_per_round, size in (*numbers, *shares):
        assert cohort_size(clients, clients_per_round) == size


def test_everybody_means_those_who_take_part_and_a_share_counts_all():
    """Of 10 clients, opt_out_clients = 0.5 leaves five."""
    algorithm = OptInFedAvg(opt_out_clients=0.5)
    participants = list(algorithm.opt_out.participants(range(10), 0))
    assert len(participants) == 5
    sizes = {}
    for clients_per_round in (None, 1.0, 0.4, 1, 3):
        cohort = phase_cohort(Phase("A", algorithm, clients_per_round=clients_per_round), 10, seed=0, round=0)
        assert set(cohort) <= set(participants)
        sizes[str(clients_per_round)] = len(cohort)
    assert sizes == {"None": 5, "1.0": 5, "0.4": 4, "1": 1, "3": 3}
    assert phase_cohort(Phase("A", algorithm), 10, seed=0, round=0) == participants


class Attendance(FederationCallback):
    """Notes which clients have trained in each phase and round."""

    def on_fit_start(self, run):
        self.noted = dict[tuple[str, int], list[int]]()

    def on_client_end(self, run, phase, round, client):
        self.noted.setdefault((phase.name, round), []).append(client)


def test_clients_join_and_leave_between_phases(tmp_path):
    """In autumn, client 0 has left and client 2 has joined; spring is as if there were no client 2."""
    partial = FedAvg("global_expert.extractor.*")
    spring = phase("spring", partial, gate=GlobalOnly(), rounds=2, clients=[1, 0])
    autumn = phase("autumn", partial, gate=GlobalOnly(), rounds=2, clients=[1, 2], start="spring")
    attendance, data = Attendance(), blobs()
    states = run([spring, autumn], mixture(), data, tmp_path, callbacks=[attendance]).run.states
    expected = {("spring", 0): [0, 1], ("spring", 1): [0, 1], ("autumn", 0): [1, 2], ("autumn", 1): [1, 2]}
    assert {key: sorted(clients) for key, clients in attendance.noted.items()} == expected

    x, y, *test = (getattr(data.arrays, name) for name in ("x_train", "y_train", "x_test", "y_test"))
    data = TensorData(x, y, data.partitioner.parts[:2], test, torch.float64, batch_size=data.batch_size)
    without = run([phase("spring", partial, gate=GlobalOnly(), rounds=2)], mixture(), data, tmp_path).run.states[
        "spring"
    ]
    assert_same_bits(states["spring"].server, without.server)
    for client in (0, 1):
        assert_same_bits(states["spring"].clients[client], without.clients[client])
    assert 2 not in states["spring"].clients, "it has kept nothing yet"
    assert_same_bits(states["autumn"].clients[0], states["spring"].clients[0])


def test_clients_that_have_left_exchange_nothing(tmp_path):
    partial, met = "global_expert.extractor.*", []

    class Meeting(FedAvg):
        def exchange(self, server, clients, round):
            met.append(sorted(clients))
            yield from ()

    spring = phase("spring", FedAvg(partial), gate=GlobalOnly())
    autumn = phase("autumn", Meeting(partial), gate=GlobalOnly(), rounds=2, clients=[1, 2], start="spring")
    states = run([spring, autumn], mixture(), blobs(), tmp_path).run.states
    assert [*states["autumn"].clients] == [0, 1, 2], "all have kept something"
    assert met == [[1, 2], [1, 2]]


@pytest.mark.parametrize("clients", [[0, 3], [-1], [], ["0"]])
def test_clients_that_there_are_not_are_refused(clients, tmp_path):
    with pytest.raises(InvalidArgumentError, match=r"Phase 'A': clients is .*, but must be ids from 0 to 2"):
        run([phase("A", FedAvg(), clients=clients)], mixture(), blobs(), tmp_path)


def test_only_clients_that_the_algorithm_lets_take_part_are_drawn():
    algorithm = OptInFedAvg(opt_out_clients=0.5)
    participants = list(algorithm.opt_out.participants(range(10), 0))
    out = ({*range(10)} - {*participants}).pop()
    some = Phase("A", algorithm, clients=[*participants[:2], out])
    assert phase_cohort(some, 10, seed=0, round=0) == participants[:2]
