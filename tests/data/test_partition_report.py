"""What is said of a partition: the table, and the line of the log with its warnings."""

import logging
import re

import numpy as np
import pytest
from helpers.data import Own, numbered, set_up, vectors

from fedmoe_pl.data import IID, Digits, Dirichlet, MajorityClasses, NaturalIds, Shards, partition_table
from fedmoe_pl.data.partition_report import log_partition
from fedmoe_pl.setup.data import set_up as set_up_for_a_run


@pytest.mark.parametrize("num_clients", [1, 41, 1001])
def test_the_table_shows_who_holds_what(num_clients):
    data = set_up(Own(vectors(6000), num_clients=num_clients, test_fraction=0.1, validation_fraction=0.1))
    lines = partition_table(data).splitlines()
    assert lines[0] == f"{num_clients} clients, 3 classes, 6000 training samples, 4 global test samples"
    assert len({len(line) for line in lines[2:]}) == 1
    assert len(lines) == 8 + min(num_clients, 41)  # 40 clients and a line of dots
    assert lines[2].split() == ["client", "train", "validation", "test", *"class 0 class 1 class 2".split()]
    first = [int(cell) for cell in lines[4].split()]
    sizes = [len(part[0]) for part in (data.train_samples, data.validation_samples, data.test_samples)]
    assert first == [0, *sizes, *map(int, data.class_counts()[0])]


def test_many_classes_are_summed_up_in_the_table():
    data = set_up(Own(vectors(100, num_classes=62), num_clients=2))
    header = partition_table(data).splitlines()[2]
    assert header.split() == ["client", "train", "classes", "largest", "class", "its", "samples"]


def test_the_table_tells_how_many_samples_stay_with_nobody():
    data = set_up(Own(numbered(np.arange(100) % 10), num_clients=4, partitioner=MajorityClasses(0.5, 20)))
    assert partition_table(data).startswith("4 clients, 10 classes, 80 of 100 training samples, 2 global test samples")


def logged(datamodule, caplog):
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        set_up_for_a_run(datamodule, [], seed=0)
        log_partition(datamodule)
    (record,) = [each for each in caplog.records if "training samples" in each.message]
    return record.levelno, record.message


def test_the_log_says_how_the_samples_are_divided(caplog):
    data = Digits(num_clients=5, partitioner=Dirichlet(0.3, 20), test_fraction=0.2)
    level, text = logged(data, caplog)
    sizes = [len(part) for part in data.train_samples]
    classes = [len({*data.y[part].tolist()}) for part in data.train_samples]
    assert level == logging.INFO and min(classes) < max(classes)
    assert text == (
        "Digits: Dirichlet(alpha=0.3, minimum_samples=20), 5 clients with "
        f"{min(sizes)} to {max(sizes)} training samples and samples of {min(classes)} to {max(classes)} of 10 classes. "
        "What is random in it follows partition_seed 0, not the run's seed."
    )


OF_TWO = {"num_clients": 2}
ZEROS, FROM_ONE = numbered([0] * 8, [0, 0]), numbered([*range(1, 5)] * 2, range(1, 5))


@pytest.mark.parametrize(
    ("arrays", "arguments", "warning"),
    [
        (vectors(8), OF_TWO, "No partitioner is given, so all clients have samples of the same distrib"),
        (vectors(11), OF_TWO | {"partitioner": IID(), "test_fraction": 0.1}, "test_fraction 0.1 .* for 1 of 2 "),
        (ZEROS, OF_TWO | {"partitioner": Shards()}, "All samples have class 0, so accuracies say nothing."),
        (FROM_ONE, OF_TWO | {"partitioner": Shards()}, "No sample has class 0, for .* Labels begin with 0."),
        (numbered([0, 9] * 4), {"num_clients": 1}, r"No sample has class 2, 3, 4, 5, 6, \.\.\., for which models"),
    ],
)
def test_what_seems_to_be_forgotten_or_wrong_is_a_warning(arrays, arguments, warning, caplog):
    level, text = logged(Own(arrays, **arguments), caplog)
    assert level == logging.WARNING
    assert re.search(warning, text), text


@pytest.mark.parametrize(
    "make",
    [
        lambda: Own(vectors(8, client_train=np.arange(8) % 2)),  # the data say which client has what
        lambda: Own(vectors(8, client_train=np.arange(8) % 2), partitioner=NaturalIds()),
        lambda: Own(vectors(8), num_clients=1),
    ],
)
def test_nothing_is_wrong_where_the_data_or_the_user_say_who_has_what(make, caplog):
    assert logged(make(), caplog)[0] == logging.INFO
