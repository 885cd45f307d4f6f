"""The line of the log that says how the data of a run were divided."""

import logging
import re

import numpy as np
import pytest
from helpers.data import Own, numbered, vectors

from fedmoe_pl.data import IID, Digits, Dirichlet, NaturalIds, Shards
from fedmoe_pl.data.partition_report import log_partition
from fedmoe_pl.setup.data import set_up


def logged(datamodule, caplog):
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        set_up(datamodule, [], seed=0)
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
        f"{min(sizes)} to {max(sizes)} training samples and samples of {min(classes)} to {max(classes)} of 10 classes."
    )


ZEROS, FROM_ONE = numbered([0] * 8, [0, 0]), numbered([*range(1, 5)] * 2, range(1, 5))


@pytest.mark.parametrize(
    ("arrays", "arguments", "warning"),
    [
        (vectors(8), {"num_clients": 2}, "No partitioner is given, so all clients have samples of the same distrib"),
        (
            vectors(11),
            {"num_clients": 2, "partitioner": IID(), "test_fraction": 0.1},
            "test_fraction 0.1 .* for 1 of 2 clients",
        ),
        (ZEROS, {"num_clients": 2, "partitioner": Shards()}, "All samples have class 0, so accuracies say nothing."),
        (FROM_ONE, {"num_clients": 2, "partitioner": Shards()}, "No sample has class 0, for .* Labels begin with 0."),
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
