"""Partitions by Dirichlet distributions: their skew, sizes and minimum."""

import numpy as np
import pytest
from helpers.data import CIFAR10_LABELS, dealt

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import BalancedDirichlet, ClientDirichlet, Dirichlet, Pathological


@pytest.mark.parametrize(("alpha", "largest_share"), [(0.5, 0.38), (0.9, 0.31), (2, 0.22)])
def test_dirichlet_is_as_skewed_as_the_official_partition(alpha, largest_share):
    # computed with the official code: the mean share of a client's largest class, CIFAR-10's labels, 100 clients
    labels = np.arange(50_000) % 10
    parts = Dirichlet(alpha)(labels, 100, np.random.default_rng(0))
    shares = [np.bincount(labels[part], minlength=10).max() / len(part) for part in parts]
    assert np.mean(shares) == pytest.approx(largest_share, abs=0.02)


@pytest.mark.parametrize("kind", [Dirichlet, BalancedDirichlet])
def test_a_huge_alpha_gives_every_client_the_same_share_of_every_class(kind):
    assert (dealt(kind(1e12), np.arange(1000) % 5, 10) == 20).all()


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


def test_client_dirichlet_also_draws_from_the_classes_that_are_left_with_its_alpha():
    labels = np.repeat([0, 1, 2], [10, 300, 300])  # a third of 40 clients draw class 0, which one of them uses up
    classes_of_clients = (dealt(ClientDirichlet(1e-3, 10), labels, 40) > 0).sum(axis=1)
    assert classes_of_clients.sum() <= 42  # nearly every client has a single class


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


def drawn_again(alpha, labels, num_clients, least, rng):
    """As Flower and PFLlib: the shares of all classes are drawn until each client has enough samples."""
    while True:
        owners = np.empty(len(labels), dtype=int)
        for c in range(labels.max() + 1):
            shares = rng.dirichlet(np.full(num_clients, alpha))
            ends = np.rint(np.cumsum(shares[:-1]) * (labels == c).sum()).astype(int)
            for client, part in enumerate(np.split(rng.permutation(np.flatnonzero(labels == c)), ends)):
                owners[part] = client
        if np.bincount(owners, minlength=num_clients).min() >= least:
            return [np.flatnonzero(owners == client) for client in range(num_clients)]


@pytest.mark.parametrize("least", [1, 4])
def test_shares_are_drawn_again_until_each_client_has_enough_samples(least):
    labels, found = np.arange(200) % 4, []
    for seed in range(4):
        parts = Dirichlet(0.2, least)(labels, 10, np.random.default_rng(seed))
        expected = drawn_again(0.2, labels, 10, least, np.random.default_rng(seed))
        assert all(np.array_equal(*each) for each in zip(parts, expected, strict=True))
        found.append(min(map(len, parts)))
    assert min(found) >= least


@pytest.mark.parametrize(
    "partitioner",
    [Dirichlet(0.01, 3), BalancedDirichlet(0.01, 3), Pathological(1, "dirichlet", 0.01, minimum_samples=3)],
)
@pytest.mark.few(1)
def test_a_minimum_that_nobody_reaches_is_named(partitioner):
    refusal = "minimum_samples is 3, but must be lower, or num_clients lower.*, because in 1000 attempts some of 10"
    with pytest.raises(InvalidArgumentError, match=refusal):
        partitioner(np.arange(30) % 2, 10, np.random.default_rng(0))
    with pytest.raises(InvalidArgumentError, match="minimum_samples is 0, but must be"):
        type(partitioner)(1, minimum_samples=0)
