"""Bins of a continuous target: their sizes, partitions by them, and what is refused."""

import numpy as np
import pytest
import torch
from helpers.data import Own, numbered, refusal_of, set_up
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset

from fedmoe_pl.callbacks.figures import partition_figure
from fedmoe_pl.data import IID, Arrays, Dirichlet, FromDatasets, Shards, partition_rows, partition_table


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


def dealt(partitioner, n=1000, target_bins=10, num_clients=10, **kwargs):
    return set_up(
        Own(values(normal(n)), num_clients=num_clients, partitioner=partitioner, target_bins=target_bins, **kwargs)
    )


@pytest.mark.parametrize("partitioner", [Dirichlet(0.5), Shards(1), IID()])
def test_bins_are_dealt_and_split_as_classes_are(partitioner):
    arguments = {"test_fraction": 0.2, "validation_fraction": 0.1, "stratify": True}
    data = dealt(partitioner, **arguments)
    of_classes = Own(numbered(data.bins[:1000].tolist()), num_clients=10, partitioner=partitioner, **arguments)
    set_up(of_classes)
    for name in ("train_samples", "validation_samples", "test_samples"):
        own, others = getattr(data, name), getattr(of_classes, name)
        assert [part.tolist() for part in own] == [part.tolist() for part in others] and len(own.indices)


@pytest.mark.parametrize("alpha", [1e-6, 1e-300])
def test_a_tiny_alpha_gives_every_bin_to_one_client(alpha):
    counts = dealt(Dirichlet(alpha), target_bins=50, num_clients=3).bin_counts()
    assert (counts.sort(dim=0).values == torch.tensor([[0.0], [0.0], [20.0]])).all()


def test_the_partition_is_shown_by_bin():
    data = dealt(Dirichlet(0.5), target_bins=4, num_clients=3)
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
