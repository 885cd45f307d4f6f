"""What holds for all partitioners: nothing is held twice, and seeds repeat."""

import numpy as np
import pytest
import torch
from helpers import TensorData
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.data import (
    IID,
    BalancedDirichlet,
    ClientDirichlet,
    Dirichlet,
    MajorityClasses,
    NaturalIds,
    Pathological,
    Shards,
    TwoClasses,
)


@given(st.lists(st.sampled_from(["f1", "a9", "z"]), min_size=1, max_size=50))
@settings(max_examples=50, deadline=None)
def test_natural_ids_keep_every_sample_with_its_client(ids):
    parts = NaturalIds()(np.zeros(len(ids)), None, np.random.default_rng(0), np.array(ids))
    assert sorted(np.concatenate([*parts.values()]).tolist()) == list(range(len(ids)))
    assert [*parts] == sorted(set(ids))
    for name, part in parts.items():
        assert {ids[i] for i in part} == {name}


PARTITIONERS = st.one_of(
    st.just(IID()),
    st.builds(Dirichlet, st.sampled_from([0.001, 0.5, 1e6])),
    st.builds(
        MajorityClasses, st.floats(0.01, 1), st.none() | st.integers(1, 20), st.sampled_from(["random", "product"])
    ),
    st.builds(TwoClasses, st.integers(2, 20), st.just(0.5)),
    st.builds(Shards, st.integers(1, 3)),
    st.builds(Pathological, st.integers(1, 3)),
    st.builds(Pathological, st.integers(1, 3), st.just("dirichlet"), st.floats(0.1, 10)),
    st.builds(ClientDirichlet, st.floats(0.001, 100), st.integers(1, 20)),
    st.builds(BalancedDirichlet, st.floats(0.1, 100), st.integers(1, 5)),
)


@given(PARTITIONERS, st.integers(1, 300), st.integers(1, 12), st.integers(1, 7), st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_every_partition_is_disjoint_and_reproducible_or_refused(partitioner, n, num_clients, num_classes, seed):
    labels = np.random.default_rng(seed).integers(0, num_classes, n)
    try:
        parts = partitioner(labels, num_clients, np.random.default_rng(seed))
    except MisconfigurationException:
        return
    assert len(parts) == num_clients
    held = np.concatenate(parts)
    assert len(np.unique(held)) == len(held) and set(held) <= set(range(n))
    if isinstance(partitioner, IID):
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
    if isinstance(partitioner, IID | Dirichlet | Shards | BalancedDirichlet):
        assert len(held) == n  # nothing is left over
    if isinstance(partitioner, MajorityClasses | TwoClasses | ClientDirichlet):
        assert {len(part) for part in parts} == {partitioner.samples_per_client or len(parts[0])}
    if isinstance(partitioner, Dirichlet | Pathological | BalancedDirichlet):
        assert min(map(len, parts)) >= (partitioner.minimum_samples or 1)
    again = partitioner(labels, num_clients, np.random.default_rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize("partitioner", [MajorityClasses(0.5), Pathological(2), TwoClasses(30), Dirichlet(0.5)])
def test_class_numbers_without_samples_change_no_partition(partitioner):
    labels = np.arange(900) % 9
    parts = [partitioner(each, 10, np.random.default_rng(0)) for each in (labels, 2 * labels + 1)]
    for one, other in zip(*parts, strict=True):
        assert np.array_equal(one, other)


@pytest.mark.parametrize(
    "partitioner", [IID(), MajorityClasses(1.0, 10, "product"), Dirichlet(1e9), BalancedDirichlet(1e9)]
)
def test_which_samples_of_a_class_a_client_gets_is_random(partitioner):
    labels = np.arange(400) % 2
    firsts = [[part[0] for part in partitioner(labels, 4, np.random.default_rng(seed))] for seed in range(10)]
    assert all(len(set(of_client)) > 3 for of_client in zip(*firsts, strict=True))


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([[True, False], [False, True]], r"arrays of integers, because one of them is bool of shape \(2,\)"),
        ([[0.0, 1.0], [2.0]], "one of them is float32"),
        ([[[0, 1]], [[2, 3]]], r"of shape \(1, 2\)"),
        ([[0, 1], [2, 6]], "from 0 to 5, because the index 6 occurs"),
        ([[0, -1], [2]], "because the index -1 occurs"),
        ([[0, 1], [1, 2]], "without common indices, because the index 1 occurs twice"),
        ([], "at least one array"),
    ],
)
def test_what_an_own_partitioner_returns_is_checked(parts, reason):
    data = TensorData(torch.zeros(6, 2), torch.arange(6) % 2, parts, (torch.ones(3, 2), torch.arange(3) % 2))
    with pytest.raises(MisconfigurationException, match=f"^GivenParts: what it returns is .*, but .*{reason}"):
        data.setup()
