"""Stratified splits, pooled data, and balanced global test sets."""

import numpy as np
import pytest
import torch
from helpers import GivenParts
from helpers.data import Own, counts, numbered, set_up
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import IID, Pathological, partition_table


def test_a_stratified_split_rounds_each_class_of_a_client_by_itself():
    # client 0 has 10 of class 0, 5 of class 1, 1 of class 2; client 1 has 4 of class 1 and 20 of class 2
    labels = [0] * 10 + [1] * 5 + [2] + [1] * 4 + [2] * 20
    parts = GivenParts([torch.arange(16).flip(0), torch.arange(16, 40)])
    arguments = {"partitioner": parts, "test_fraction": 0.2, "validation_fraction": 0.1, "stratify": True}
    data = set_up(Own(numbered(labels), **arguments))
    assert counts(data, data.test_samples) == [[2, 1, 0], [0, 1, 4]]
    assert counts(data, data.validation_samples) == [[1, 0, 0], [0, 0, 2]]  # 0.5 and 0.4 are rounded to 0
    assert counts(data, data.train_samples) == [[7, 4, 1], [0, 3, 14]]
    held = torch.cat([*data.train_samples, *data.validation_samples, *data.test_samples])
    assert held.sort().values.tolist() == list(range(40))
    assert all(set(own.tolist()) <= set(range(16)) for own in (data.train_samples[0], data.test_samples[0]))
    other = set_up(Own(numbered(labels), **arguments, partition_seed=1))
    assert other.test_samples[1].tolist() != data.test_samples[1].tolist()


@given(st.booleans(), st.integers(1, 12), st.floats(0, 0.99), st.floats(0, 0.99), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_every_sample_is_held_once_and_every_client_can_train(stratify, num_clients, test, validation, seed):
    if test + validation >= 1:
        return
    labels = np.random.default_rng(seed).integers(0, 3, 40)
    arguments = {"num_clients": num_clients, "test_fraction": test, "validation_fraction": validation}
    try:
        data = set_up(Own(numbered(labels), stratify=stratify, partition_seed=seed, **arguments))
    except InvalidArgumentError as error:
        assert "rounds to no sample" in str(error)
        return
    assert data.global_test.tolist() == [40, 41]
    dealt = IID()(labels, num_clients, np.random.default_rng(np.random.SeedSequence(seed)))
    for client, part in enumerate(dealt):
        parts = [parts[client] for parts in (data.train_samples, data.validation_samples, data.test_samples)]
        assert torch.cat(parts).sort().values.tolist() == sorted(part.tolist())
        trained = set(data.y[parts[0]].tolist())
        assert trained == set(labels[part].tolist()) if stratify else trained
        own = torch.cat(parts[:2])
        expected = torch.bincount(data.y[own], minlength=data.num_classes).double() / len(own)
        torch.testing.assert_close(data.class_shares[client], expected)


def test_pooled_data_are_all_shared_out_and_tested_on_what_is_held_out():
    y = np.arange(60) % 10
    arguments = {"partitioner": Pathological(), "test_fraction": 0.2, "pool": True, "stratify": True}
    data = set_up(Own(numbered(y[:50], y[50:]), num_clients=5, **arguments))
    held = torch.cat([*data.train_samples, *data.test_samples])
    assert held.sort().values.tolist() == list(range(60))  # 5 clients of 2 classes have the 10 classes to themselves
    classes = data.class_counts() > 0
    assert classes.sum(dim=1).tolist() == [2] * 5
    assert counts(data, data.test_samples) == classes.long().tolist()  # 1 of the 6 samples of each of its classes
    assert data.global_test.tolist() == sorted(data.test_samples.indices.tolist())
    assert partition_table(data).startswith("5 clients, 10 classes, 60 pooled samples, 10 global test samples")
    validated = set_up(Own(numbered(y[:50], y[50:]), num_clients=5, **arguments, validation_fraction=0.2))
    assert len(validated.validation_samples.indices) == 10, "which are in no test set"
    assert validated.global_test.tolist() == sorted(validated.test_samples.indices.tolist())


def test_pooled_natural_clients_hold_their_training_and_test_samples():
    arrays = numbered([0] * 6, [1] * 5, client_train=np.array([*"aabbbb"]), client_test=np.array([*"abbcc"]))
    data = set_up(Own(arrays, test_fraction=0.5, pool=True))
    own = [
        sorted(torch.cat(parts).tolist()) for parts in zip(data.train_samples, data.test_samples, strict=True)
    ]  # the writer c, without training samples, is a client too
    assert own == [[0, 1, 6], [2, 3, 4, 5, 7, 8], [9, 10]]
    assert data.test_samples.sizes.tolist() == [2, 3, 1]  # 1.5 is rounded to the even 2
    assert len(data.global_test) == 6


@pytest.mark.parametrize(("size", "by_class"), [(6, [2, 2, 2]), (7, [3, 2, 2]), (9, [3, 3, 3])])
def test_the_global_test_set_is_cut_to_equally_many_of_each_class(size, by_class):
    arrays = numbered([0, 1, 2] * 4, [0] * 3 + [1] * 20 + [2] * 5)
    data = set_up(Own(arrays, num_clients=2, global_test_size=size))
    assert counts(data, [data.global_test]) == [by_class]
    assert data.global_test.min() >= 12 and len(data.global_test.unique()) == size
    again = set_up(Own(arrays, num_clients=4, partitioner=IID(), global_test_size=size))
    assert again.global_test.tolist() == data.global_test.tolist()  # whoever the clients are
    seeds = [set_up(Own(arrays, num_clients=2, global_test_size=size, partition_seed=seed)) for seed in range(5)]
    assert len({tuple(other.global_test.tolist()) for other in seeds}) > 1
    whole = set_up(Own(arrays, num_clients=2))
    assert whole.global_test.tolist() == list(range(12, 40))
    assert partition_table(data).startswith(f"2 clients, 3 classes, 12 training samples, {size} global test samples")
