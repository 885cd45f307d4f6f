"""The partitions of the papers: exact counts, nothing held twice, and what is refused."""

import numpy as np
import pytest
from helpers.data import assert_names_an_argument
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.data import (
    BalancedDirichlet,
    ClientDirichlet,
    MajorityClasses,
    Partitioner,
    Pathological,
    Shards,
    TwoClasses,
)
from fedmoe_pl.data.partitioners.classes import draw_classes

CIFAR10_LABELS = np.arange(50_000) % 10


def dealt(partitioner: Partitioner, labels: np.ndarray, num_clients: int | None, seed=0) -> np.ndarray:
    """Samples of each class that each client holds, (num_clients, num_classes); none may be held twice."""
    parts = partitioner(labels, num_clients, np.random.default_rng(seed))
    held = np.concatenate(parts)
    assert len(np.unique(held)) == len(held)
    return np.stack([np.bincount(labels[part], minlength=labels.max() + 1) for part in parts])


PARTITIONERS = st.one_of(
    st.builds(
        MajorityClasses, st.floats(0.01, 1), st.none() | st.integers(1, 20), st.sampled_from(["random", "product"])
    ),
    st.builds(TwoClasses, st.integers(2, 20), st.just(0.5)),
    st.builds(Shards, st.integers(1, 3)),
    st.builds(Pathological, st.integers(1, 3), st.sampled_from(["uniform", "dirichlet"]), st.floats(0.1, 10)),
    st.builds(ClientDirichlet, st.floats(0.001, 100), st.integers(1, 20)),
    st.builds(BalancedDirichlet, st.floats(0.1, 100), st.integers(1, 5)),
)


@given(PARTITIONERS, st.integers(1, 300), st.integers(1, 12), st.integers(1, 7), st.integers(0, 2**32))
@settings(max_examples=300, deadline=None)
def test_every_partition_is_disjoint_and_reproducible_or_refused(partitioner, n, num_clients, num_classes, seed):
    labels = np.random.default_rng(seed).integers(0, num_classes, n)
    try:
        parts = partitioner(labels, num_clients, np.random.default_rng(seed))
    except MisconfigurationException as error:
        assert_names_an_argument(str(error))
        return
    assert len(parts) == num_clients
    held = np.concatenate(parts)
    assert len(np.unique(held)) == len(held) and set(held) <= set(range(n))
    if isinstance(partitioner, Shards | BalancedDirichlet):
        assert len(held) == n  # nothing is left over
    if isinstance(partitioner, MajorityClasses | TwoClasses | ClientDirichlet):
        assert {len(part) for part in parts} == {partitioner.samples_per_client or len(parts[0])}
    if isinstance(partitioner, BalancedDirichlet):
        assert min(map(len, parts)) >= partitioner.minimum_samples
    again = partitioner(labels, num_clients, np.random.default_rng(seed))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


@pytest.mark.parametrize(
    ("share", "by_class"),
    [
        (0.2, [50] * 10),  # IID
        (0.5, [31] * 6 + [32] * 2 + [125] * 2),  # 250 of two classes, 250 of the eight others
        (0.7, [18] * 2 + [19] * 6 + [175] * 2),  # 2 * 18 + 6 * 19 = 150
        (1.0, [0] * 8 + [250] * 2),
    ],
)
def test_two_majority_classes_have_their_share_and_the_others_the_rest(share, by_class):
    counts = dealt(MajorityClasses(share, 500), CIFAR10_LABELS, 100)
    assert np.sort(counts, axis=1).tolist() == [by_class] * 100


def test_random_majority_pairs_are_different_classes_and_use_every_class_equally_often():
    counts = dealt(MajorityClasses(1.0, 100), CIFAR10_LABELS, 35)
    assert ((counts > 0).sum(axis=1) == 2).all()
    assert ((counts > 0).sum(axis=0) == 7).all()  # 70 places for 10 classes
    assert len({tuple(row) for row in counts > 0}) > 20  # of 45 pairs; not the same few again and again
    assert (dealt(MajorityClasses(1.0, 100), CIFAR10_LABELS, 35, seed=1) != counts).any()


def test_product_pairs_are_the_official_ones_and_an_equal_pair_is_one_class():
    # client 0 has (0, 0), client 1 (0, 1), client 2 (0, 2), client 3 (1, 0), of 3 classes
    counts = dealt(MajorityClasses(0.6, 10, "product"), np.arange(90) % 3, 4)
    assert counts.tolist() == [[6, 2, 2], [3, 3, 4], [3, 4, 3], [3, 3, 4]]
    counts = dealt(MajorityClasses(1.0, 10, "product"), np.arange(900) % 3, 9)
    one_to_three = [[10, 0, 0], [5, 5, 0], [5, 0, 5]]
    assert counts.tolist() == [*one_to_three, [5, 5, 0], [0, 10, 0], [0, 5, 5], [5, 0, 5], [0, 5, 5], [0, 0, 10]]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 1.0])
def test_without_a_size_clients_get_as_many_samples_as_the_classes_allow(share):
    # every class is a majority class of 20 of 100 clients, so that all 50,000 samples can be dealt
    assert (dealt(MajorityClasses(share), CIFAR10_LABELS, 100).sum(axis=1) == 500).all()


@pytest.mark.parametrize("partitioner", [MajorityClasses(1.0, 10, "product"), BalancedDirichlet(1e9)])
def test_which_samples_of_a_class_a_client_gets_is_random(partitioner):
    labels = np.arange(400) % 2
    firsts = [[part[0] for part in partitioner(labels, 4, np.random.default_rng(seed))] for seed in range(10)]
    assert all(len(set(of_client)) > 3 for of_client in zip(*firsts, strict=True))


def test_a_class_that_runs_out_is_refused_with_the_size_that_is_possible():
    # pairs (0, 0), (0, 1), (0, 2): with 10 each they take 10 + 5 + 5 = 20 of class 0, with 11 each 11 + 6 + 6 = 23
    labels = np.repeat([0, 1, 2], [20, 100, 100])
    message = r"samples_per_client is 11, but the classes have only enough training samples for 10 per client; lower"
    with pytest.raises(MisconfigurationException, match=message):
        MajorityClasses(1.0, 11, "product")(labels, 3, np.random.default_rng(0))
    assert (dealt(MajorityClasses(1.0, 10, "product"), labels, 3).sum(axis=1) == 10).all()
    assert (dealt(MajorityClasses(1.0, pairs="product"), labels, 3).sum(axis=1) == 10).all()
    with pytest.raises(MisconfigurationException, match=r"samples_per_client is 22, .* enough .* for 20 per client"):
        TwoClasses(22)(np.arange(20) % 2, 1, np.random.default_rng(0))


@pytest.mark.parametrize(("balance", "by_class"), [(0.5, [250, 250]), (0.75, [125, 375])])
def test_two_classes_are_balanced_or_not(balance, by_class):
    counts = dealt(TwoClasses(500, balance), CIFAR10_LABELS, 50)
    assert np.sort(counts, axis=1)[:, -2:].tolist() == [by_class] * 50
    assert counts.sum() == 50 * 500
    assert ((counts > 0).sum(axis=0) == 10).all()


def test_shards_are_pieces_of_the_sorted_samples():
    labels = np.random.default_rng(0).permutation(CIFAR10_LABELS)
    parts = Shards()(labels, 100, np.random.default_rng(0))
    counts = dealt(Shards(), labels, 100)
    assert (counts.sum(axis=1) == 500).all() and (counts % 250 == 0).all()  # 200 shards of 250, each of one class
    assert counts.sum() == 50_000
    place = np.empty(50_000, dtype=np.int64)
    place[np.argsort(labels, kind="stable")] = np.arange(50_000)
    for part in parts:
        for shard in np.split(place[part], 2):
            assert shard[0] % 250 == 0 and (np.diff(shard) == 1).all()
    assert 1 <= (counts == 500).sum() <= 25  # two shards of one class: a chance of 19 / 199 for each of 100 clients


def test_pathological_shares_differ_by_half_at_most_and_use_up_every_class():
    counts = dealt(Pathological(), CIFAR10_LABELS, 100)
    assert ((counts > 0).sum(axis=1) == 2).all()
    assert ((counts > 0).sum(axis=0) == 20).all()  # 2 * 100 / 10
    assert (counts.sum(axis=0) == 5000).all()
    for column in counts.T:
        own = column[column > 0]
        assert own.max() <= 1.5 * own.min() + 2  # 0.6 / 0.4, and rounding to whole samples
        assert own.max() > 1.2 * own.min()  # and not all the same
    two = dealt(Pathological(), CIFAR10_LABELS, 10)  # two clients per class: between 0.4 / 1.0 and 0.6 / 1.0
    assert (two[two > 0] >= 2000).all() and (two[two > 0] <= 3000).all()


def test_pathological_dirichlet_shares_follow_the_concentration():
    alike = dealt(Pathological(share="dirichlet", concentration=1e9), CIFAR10_LABELS, 100)
    assert np.abs(alike[alike > 0] - 250).max() <= 1
    skewed = dealt(Pathological(share="dirichlet", concentration=1.0), CIFAR10_LABELS, 100)
    # Dir(1) over 20: the expected largest share is the 20th harmonic number / 20 = 0.18
    assert skewed.max(axis=0).mean() / 5000 == pytest.approx(sum(1 / k for k in range(1, 21)) / 20, abs=0.03)
    assert (skewed.sum(axis=0) == 5000).all()


@pytest.mark.parametrize(("num_clients", "per_client"), [(100, 10), (7, 3), (50, 2), (3, 1)])
def test_drawn_classes_differ_within_a_client_and_are_used_equally_often(num_clients, per_client):
    classes = draw_classes(num_clients, per_client, 10, np.random.default_rng(0))
    assert all(len(set(own)) == per_client for own in classes.tolist())
    used = np.bincount(classes.flatten(), minlength=10)
    assert used.max() - used.min() <= 1 and used.sum() == num_clients * per_client


def test_client_dirichlet_fixes_the_size_and_alpha_the_skew():
    alike = dealt(ClientDirichlet(1e9, 400), CIFAR10_LABELS, 100)
    assert (alike.sum(axis=1) == 400).all()
    # multinomial counts of 400 with p = 0.1: variance 36
    assert alike.var() == pytest.approx(36, rel=0.15)
    skewed = dealt(ClientDirichlet(0.5, 100), CIFAR10_LABELS, 100)
    # of shares q ~ Dir(a 1_C) the sum of squares has the expectation (a + 1) / (C a + 1) = 1.5 / 6; with counts of n
    # samples it is that times (n - 1) / n plus 1 / n
    expected = 1.5 / 6 * 99 / 100 + 1 / 100
    assert ((skewed / 100) ** 2).sum(axis=1).mean() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("alpha", [1e-3, 0.5, 1e6])
def test_client_dirichlet_draws_from_the_other_classes_where_one_is_used_up(alpha):
    labels = np.repeat([0, 1, 2], [5, 100, 15])
    counts = dealt(ClientDirichlet(alpha, 12), labels, 10)
    assert counts.sum(axis=0).tolist() == [5, 100, 15] and (counts.sum(axis=1) == 12).all()


def test_balanced_dirichlet_gives_no_further_class_to_a_client_that_has_its_share():
    labels = np.arange(1200) % 10
    reached = 0
    for seed in range(20):
        sizes = np.cumsum(counts := dealt(BalancedDirichlet(0.3), labels, 10, seed), axis=1)
        assert sizes[:, -1].sum() == 1200 and sizes[:, -1].min() >= 10
        full = sizes[:, :-1] >= 120  # after each class
        assert not counts[:, 1:][full].any()
        reached += full.any(axis=1).sum()
    assert reached > 20


def test_balanced_dirichlet_tries_until_every_client_has_the_minimum():
    labels = np.arange(600) % 3
    least = [dealt(BalancedDirichlet(0.5, minimum_samples=1), labels, 10, seed).sum(axis=1).min() for seed in range(20)]
    assert min(least) < 30  # by itself a client may have less
    for seed in range(20):
        assert dealt(BalancedDirichlet(0.5, minimum_samples=30), labels, 10, seed).sum(axis=1).min() >= 30


TEN = np.arange(100) % 10


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MajorityClasses(0), r"majority_share is 0, but must be in \(0, 1\]"),
        (lambda: MajorityClasses(1.1), r"majority_share is 1\.1, "),
        (lambda: MajorityClasses(0.5, 0), r"samples_per_client is 0, "),
        (lambda: MajorityClasses(0.5, pairs="all"), r"pairs is 'all', but must be one of random, product"),  # pyright: ignore
        (lambda: MajorityClasses(0.5, 1)(TEN, None, np.random.default_rng()), r"num_clients is not set, "),
        (lambda: MajorityClasses(0.5, 1)(TEN % 2, 3, np.random.default_rng()), r"majority_share is 0\.5, .* 2 classes"),
        (lambda: MajorityClasses(1.0, 1)(TEN % 1, 3, np.random.default_rng()), r"majority_share is 1\.0, .* 1 classes"),
        (
            lambda: MajorityClasses(0.5, 1, "product")(TEN % 3, 10, np.random.default_rng()),
            r"num_clients is 10, but must be at most 9 .* pairs 'product', because 3 classes",
        ),
        (
            lambda: MajorityClasses(1.0, None, "product")(np.array([0, 1, 1, 1]), 2, np.random.default_rng()),
            r"samples_per_client is None, .* for 0 per client",  # both clients want the one sample of class 0
        ),
        (lambda: TwoClasses(0), r"samples_per_client is 0, "),
        (lambda: TwoClasses(500, 1.0), r"balance is 1\.0, but must be in \(0, 1\)"),
        (lambda: TwoClasses(4, 0.01), r"balance is 0\.01, .* at least one of the 4 samples"),
        (lambda: TwoClasses(2)(TEN % 1, 2, np.random.default_rng()), r"2 different classes, but the data have 1"),
        (lambda: Shards(0), r"shards_per_client is 0, "),
        (
            lambda: Shards(3)(TEN, 50, np.random.default_rng()),
            r"shards_per_client is 3, .* 150 shards, .* 100 training",
        ),
        (lambda: Pathological(0), r"classes_per_client is 0, "),
        (lambda: Pathological(share="beta"), r"share is 'beta', but must be one of uniform, dirichlet"),  # pyright: ignore
        (lambda: Pathological(concentration=0), r"concentration is 0, "),
        (lambda: Pathological(11)(TEN, 2, np.random.default_rng()), r"11 different classes, but the data have 10"),
        (lambda: ClientDirichlet(0, 5), r"alpha is 0, "),
        (lambda: ClientDirichlet(1, 0), r"samples_per_client is 0, "),
        (
            lambda: ClientDirichlet(1, 21)(TEN, 5, np.random.default_rng()),
            r"samples_per_client is 21, but must be at most 20 for 5 clients",
        ),
        (lambda: BalancedDirichlet(float("inf")), r"alpha is inf, "),
        (lambda: BalancedDirichlet(1, 0), r"minimum_samples is 0, "),
        (
            lambda: BalancedDirichlet(1, 21)(TEN, 5, np.random.default_rng()),
            r"minimum_samples is 21, but in 1000 attempts",
        ),
        (lambda: BalancedDirichlet(1e-3, 1)(TEN % 1, 5, np.random.default_rng()), r"raise alpha above 0\.001"),
    ],
)
def test_bad_arguments_are_refused_in_one_sentence(make, message):
    with pytest.raises(MisconfigurationException, match=message) as error:
        make()
    assert_names_an_argument(str(error.value))
