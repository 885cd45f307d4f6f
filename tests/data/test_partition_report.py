"""The table of a partition."""

import numpy as np
import pytest
from helpers.data import Own, numbered, set_up, vectors

from fedmoe_pl.data import MajorityClasses, partition_table


@pytest.mark.parametrize("num_clients", [1, 41, 1001])
def test_the_table_shows_who_holds_what(num_clients):
    data = set_up(Own(vectors(6000), num_clients=num_clients, test_fraction=0.1, validation_fraction=0.1))
    lines = partition_table(data).splitlines()
    assert lines[0] == f"{num_clients} clients, 3 classes, 6000 training samples, 4 global test samples"
    assert len({len(line) for line in lines[2:]}) == 1
    assert len(lines) == 8 + min(num_clients, 41)  # 40 clients and a line of dots
    assert lines[2].split() == ["client", "train", "validation", "test", *"class 0 class 1 class 2".split()]
    first = [int(cell) for cell in lines[4].split()]
    assert first == [
        0,
        *(len(part[0]) for part in (data.train_samples, data.validation_samples, data.test_samples)),
    ] + [int(count) for count in data.class_counts()[0]]


def test_many_classes_are_summed_up_in_the_table():
    data = set_up(Own(vectors(100, num_classes=62), num_clients=2))
    header = partition_table(data).splitlines()[2]
    assert header.split() == ["client", "train", "classes", "largest", "class", "its", "samples"]


def test_the_table_tells_how_many_samples_stay_with_nobody():
    data = set_up(Own(numbered(np.arange(100) % 10), num_clients=4, partitioner=MajorityClasses(0.5, 20)))
    assert partition_table(data).startswith("4 clients, 10 classes, 80 of 100 training samples, 2 global test samples")
