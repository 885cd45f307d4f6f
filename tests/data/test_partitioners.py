"""Partitions by classes or bins: exact counts, the skew of Dirichlet distributions, and what holds for all of them."""

import numpy as np
import pytest
import torch
from helpers import TensorData
from helpers.data import CIFAR10_LABELS, Own, dealt, numbered, refusal_of, set_up
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import Dataset

from fedmoe_pl.callbacks.figures import partition_figure
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import (
    IID,
    Arrays,
    BalancedDirichlet,
    ClientDirichlet,
    Dirichlet,
    FromDatasets,
    MajorityClasses,
    NaturalIds,
    Pathological,
    Shards,
    TwoClasses,
    partition_rows,
    partition_table,
)


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
    """Without a size as many as the classes allow: each is a majority class of 20 clients, so that all are dealt."""
    for size in (500, None):
        counts = dealt(MajorityClasses(share, size), CIFAR10_LABELS, 100)
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


# Bins of a continuous target


def values(y_train, y_test=(0.0, 1.0)) -> Arrays:
    y = torch.tensor([*y_train, *y_test], dtype=torch.float32)
    x, n = torch.arange(float(len(y)))[:, None], len(y_train)
    return Arrays(x[:n], y[:n], x[n:], y[n:])


def normal(n: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=n)


def binned(y_train, y_test=(0.0, 1.0), target_bins=2, **kwargs) -> list[int]:
    data = set_up(Own(values(y_train, y_test), num_clients=1, target_bins=target_bins, **kwargs))
    assert data.bins is not None
    return data.bins.tolist()


@pytest.mark.parametrize("target_bins", [2, 7, 10, 103])
def test_bins_are_ranges_of_the_target_with_equally_many_training_samples(target_bins):
    y = normal(103)
    bins = np.array(binned(y, target_bins=target_bins)[:103])
    sizes = np.bincount(bins)
    assert len(sizes) == target_bins and sizes.max() - sizes.min() <= 1
    assert (np.diff(bins[np.argsort(y)]) >= 0).all()


@given(st.lists(st.integers(-5, 5), min_size=2, max_size=60), st.lists(st.integers(-8, 8), max_size=20), st.data())
@settings(max_examples=100, deadline=None)
def test_equal_targets_are_in_one_bin_and_test_targets_in_that_of_the_training_target_below(train, test, data):
    if len({*train}) < 2:
        return
    target_bins = data.draw(st.integers(2, len({*train})))
    bins = binned(train, [*test, 0], target_bins)
    of_train = dict(zip(train, bins, strict=False))
    assert [of_train[y] for y in train] == bins[: len(train)]
    assert {*of_train.values()} == {*range(max(bins) + 1)} and len({*of_train.values()}) <= target_bins
    for y, of_test in zip(test, bins[len(train) :], strict=False):
        assert of_test == of_train[max((t for t in train if t <= y), default=min(train))]


def test_test_targets_do_not_move_the_edges_also_if_they_are_dealt_with_the_others():
    y = normal(50)
    low, high = (binned(y, np.full(30, end), 5, pool=True, test_fraction=0.2) for end in (-9.0, 9.0))
    assert low[:50] == high[:50] and {*low[50:]} == {0} and {*high[50:]} == {4}


def dealt_by_bins(partitioner, n=1000, target_bins=10, num_clients=10, **kwargs):
    return set_up(
        Own(values(normal(n)), num_clients=num_clients, partitioner=partitioner, target_bins=target_bins, **kwargs)
    )


@pytest.mark.parametrize("partitioner", [Dirichlet(0.5), Shards(1), IID()])
def test_bins_are_dealt_and_split_as_classes_are(partitioner):
    arguments = {"test_fraction": 0.2, "validation_fraction": 0.1, "stratify": True}
    data = dealt_by_bins(partitioner, **arguments)
    of_classes = Own(numbered(data.bins[:1000].tolist()), num_clients=10, partitioner=partitioner, **arguments)
    set_up(of_classes)
    for name in ("train_samples", "validation_samples", "test_samples"):
        own, others = getattr(data, name), getattr(of_classes, name)
        assert [part.tolist() for part in own] == [part.tolist() for part in others] and len(own.indices)


@pytest.mark.parametrize("alpha", [1e-6, 1e-300])
def test_a_tiny_alpha_gives_every_bin_to_one_client(alpha):
    counts = dealt_by_bins(Dirichlet(alpha), target_bins=50, num_clients=3).bin_counts()
    assert (counts.sort(dim=0).values == torch.tensor([[0.0], [0.0], [20.0]])).all()


def test_the_partition_is_shown_by_bin():
    data = dealt_by_bins(Dirichlet(0.5), target_bins=4, num_clients=3)
    rows = [*partition_rows(data)]
    counts = [[row[f"bin_{b}"] for b in range(4)] for row in rows]
    assert counts == data.bin_counts().tolist() and data.num_classes == 0
    assert partition_table(data).splitlines()[2].split() == ["client", "train", *"bin 0 bin 1 bin 2 bin 3".split()]
    assert partition_figure(rows).axes[0].get_xlabel() == "bin"


class Read(Dataset):
    """Targets that are numbers, read one by one."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[torch.Tensor, float]:
        return torch.zeros(1), index / 10


def pairs(*shape: int) -> Arrays:
    y = torch.rand(12, *shape)
    return Arrays(y[:10], y[:10], y[10:], y[10:])


def classes() -> Arrays:
    return Arrays(torch.rand(9, 1), torch.arange(9) % 3, torch.rand(3, 1), torch.arange(3))


@pytest.mark.parametrize(
    ("argument", "make", "reason"),
    [
        ("target_bins", lambda: Own(classes(), num_clients=1, target_bins=3), "these are classes"),
        ("target_bins", lambda: Own(pairs(2), num_clients=1, target_bins=3), "targets have shape (2,)"),
        ("target_bins", lambda: Own(values([1, 1, 1, 2]), num_clients=1, target_bins=3), "must be at most 2"),
        ("target_bins", lambda: Own(values([1, 2, 3]), num_clients=1, target_bins=1), ""),
        ("target_bins", lambda: Own(values([1, 2, 3]), num_clients=1, target_bins=2.5), ""),
        ("target_bins", lambda: FromDatasets(Read(), Read(), num_clients=1, target_bins=3), ""),
        ("y_train[2]", lambda: Own(values([1, 2, float("nan")]), num_clients=1, target_bins=2), ""),
        ("y_test[0]", lambda: Own(values([1, 2, 3], [float("inf")]), num_clients=1, target_bins=2), ""),
        ("partitioner", lambda: Own(values([1, 2, 3]), num_clients=1, partitioner=Dirichlet(1)), ""),
        ("stratify", lambda: Own(values([1, 2, 3]), num_clients=1, stratify=True), ""),
    ],
)
def test_what_has_no_bins_is_refused(argument, make, reason):
    refusal = refusal_of(make)
    assert refusal.argument == argument and reason in str(refusal)
