"""Partitions by classes: exact counts."""

import numpy as np
import pytest
from helpers.data import CIFAR10_LABELS, dealt

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import MajorityClasses, Pathological, Shards, TwoClasses


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
    # 0.77 of 10 samples are 8; of 5 samples, the first class of the pair has 3
    assert dealt(MajorityClasses(0.77, 10, "product"), np.arange(90) % 3, 2).tolist() == [[8, 1, 1], [4, 4, 2]]
    odd = dealt(MajorityClasses(1.0, 5, "product"), np.arange(90) % 3, 4)
    assert odd.tolist() == [[5, 0, 0], [3, 2, 0], [3, 0, 2], [2, 3, 0]]


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 1.0])
def test_without_a_size_clients_get_as_many_samples_as_the_classes_allow(share):
    # every class is a majority class of 20 of 100 clients, so that all 50,000 samples can be dealt
    assert (dealt(MajorityClasses(share), CIFAR10_LABELS, 100).sum(axis=1) == 500).all()


def test_a_class_that_runs_out_is_refused_with_the_size_that_is_possible():
    # pairs (0, 0), (0, 1), (0, 2): with 10 each they take 10 + 5 + 5 = 20 of class 0, with 11 each 11 + 6 + 6 = 23
    labels = np.repeat([0, 1, 2], [20, 100, 100])
    with pytest.raises(InvalidArgumentError) as error:
        MajorityClasses(1.0, 11, "product")(labels, 3, np.random.default_rng(0))
    assert (error.value.argument, error.value.allowed) == ("samples_per_client", "at most 10")
    assert (dealt(MajorityClasses(1.0, 10, "product"), labels, 3).sum(axis=1) == 10).all()
    assert (dealt(MajorityClasses(1.0, pairs="product"), labels, 3).sum(axis=1) == 10).all()


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
    holders = (dealt(Pathological(3), CIFAR10_LABELS, 7) > 0).sum(axis=0)  # 21 places for 10 classes
    assert sorted(holders) == [2] * 9 + [3]
    two = dealt(Pathological(), CIFAR10_LABELS, 10)  # two clients per class: between 0.4 / 1.0 and 0.6 / 1.0
    assert (two[two > 0] >= 2000).all() and (two[two > 0] <= 3000).all()


def test_pathological_dirichlet_shares_follow_the_concentration():
    alike = dealt(Pathological(share="dirichlet", concentration=1e9), CIFAR10_LABELS, 100)
    assert np.abs(alike[alike > 0] - 250).max() <= 1
    skewed = dealt(Pathological(share="dirichlet", concentration=1.0), CIFAR10_LABELS, 100)
    # Dir(1) over 20: the expected largest share is the 20th harmonic number / 20 = 0.18
    assert skewed.max(axis=0).mean() / 5000 == pytest.approx(sum(1 / k for k in range(1, 21)) / 20, abs=0.03)
    assert (skewed.sum(axis=0) == 5000).all()
