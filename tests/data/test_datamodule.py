"""The data module: what it holds, how it is split and seeded, what clients are called, and in a plain Trainer."""

import numpy as np
import pytest
import torch
from helpers import GivenParts
from helpers.data import Own, client_samples, counts, numbered, set_up, vectors
from helpers.models import trainer
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe_pl.checks import InvalidArgumentError, is_file_name
from fedmoe_pl.data import IID, Arrays, ClientNames, Digits, Dirichlet, Pathological, RandomCrop, partition_table
from fedmoe_pl.models import PersonalizedMoE, SmallMLP


@pytest.mark.parametrize("fractions", [(0.0, 0.0), (0.3, 0.0), (0.0, 0.25), (0.05, 0.9)])
def test_every_client_splits_its_samples_by_a_seed_of_its_own(fractions):
    partitioner = Dirichlet(0.9)
    data = Own(vectors(500), num_clients=20, partitioner=partitioner, partition_seed=3)
    data.test_fraction, data.validation_fraction = fractions
    data.setup()
    rng = np.random.default_rng(np.random.SeedSequence(3))
    for client, part in enumerate(partitioner(data.y[:500].numpy(), 20, rng)):
        n_test = min(round(len(part) * fractions[0]), len(part) - 1)
        n_validation = min(round(len(part) * fractions[1]), len(part) - 1 - n_test)
        if n_test + n_validation:
            part = np.random.default_rng(np.random.SeedSequence(3, spawn_key=(client,))).permutation(part)
        held = [data.test_samples[client], data.validation_samples[client], data.train_samples[client]]
        for own, expected in zip(held, np.split(part, [n_test, n_test + n_validation]), strict=True):
            assert own.tolist() == expected.tolist()


def test_setup_is_idempotent():
    data = set_up(Own(vectors(10), num_clients=2))
    x, parts = data.x, data.train_samples
    data.setup("test")
    assert data.x is x and data.train_samples is parts


def test_of_pooled_images_only_training_images_are_learned_from():
    images = torch.randint(256, (12, 1, 2, 2), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    arrays = Arrays(images[:8], torch.arange(8) % 2, images[8:], torch.arange(4) % 2)
    data = Own(arrays, num_clients=2, test_fraction=0.25, pool=True)
    data.deal()
    data.learn_from = torch.tensor([1, 5, 9])  # the last one was a test image
    data.setup()
    values = images[[1, 5]].double() / 255
    mean, std = data.normalization
    assert (*mean, *std) == pytest.approx((values.mean().item(), values.std(correction=0).item()), rel=1e-12)


def test_natural_clients_are_the_default_and_own_their_test_samples():
    arrays = vectors(3, client_train=np.array(["b", "a", "b"]), client_test=np.array(["b", "unseen", "b", "a"]))
    warning = "^Own: client_test has 1 ids that no training sample has, such as 'unseen'; their samples are in"
    with pytest.warns(UserWarning, match=warning):
        data = set_up(Own(arrays))
    assert data.num_clients == 2
    assert [part.tolist() for part in data.train_samples] == [[1], [0, 2]]
    assert [part.tolist() for part in data.test_samples] == [[6], [3, 5]]
    dealt = set_up(Own(arrays, num_clients=2, partitioner=IID()))
    assert [len(part) for part in dealt.test_samples] == [0, 0]


@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("numbers", [range(12), [-20, -3, 9, 10, 100]])
def test_natural_clients_whose_names_are_integers_are_in_their_order(numbers, pool):
    n, shift = len(numbers), 2
    ids, ids_test = (np.roll([str(number) for number in numbers], by) for by in (shift, 2 * shift))
    arrays = vectors(n, n_test=n, client_train=ids, client_test=ids_test)
    data = set_up(Own(arrays, pool=pool, test_fraction=0.5 * pool))
    assert data.client_names == [str(number) for number in numbers]
    for client in range(n):
        samples = [(client + shift) % n, n + (client + 2 * shift) % n]
        assert client_samples(data, client).tolist() == samples
        assert pool or data.test_samples[client].tolist() == samples[1:]


# PyTorch deprecates what lightning 2.6.6 uses
@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The .*_dataloader. does not have many workers")  # on more cores
def test_a_plain_trainer_takes_the_data_module_without_a_warning(tmp_path):
    data = Digits(num_clients=4, validation_fraction=0.25, augmentation=[RandomCrop(1)])
    plain, module = trainer(tmp_path, max_epochs=1), PersonalizedMoE(SmallMLP())
    plain.fit(module, data)
    assert plain.num_training_batches == -(-sum(map(len, data.train_samples)) // data.batch_size)
    assert plain.num_val_batches == [-(-sum(map(len, data.validation_samples)) // data.batch_size)]
    plain.test(module, data, verbose=False)
    predictions = plain.predict(module, data)
    assert sum(len(batch["logits"]) for batch in predictions) == len(data.global_test)


def test_there_is_no_validation_loader_without_validation_samples():
    assert set_up(Own(vectors(10), num_clients=2)).val_dataloader() == []


# Stratified splits, pooled data, and balanced global test sets


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


# What clients are called, and what their files are called


def test_files_of_different_clients_have_different_names_on_every_file_system():
    names = ClientNames(["a/b", "a\\b", "..", "x" * 300, "Ward", "ward", "tab\tin", "Süd", "client_003", "3"])
    files = [names.file(client) for client in range(len(names))]
    assert len({file.casefold() for file in files}) == len(names)
    assert all(is_file_name(f"{file}.ckpt") for file in files)
    assert names.file(7) == "Süd"


def test_a_client_without_a_name_has_its_number():
    names = ClientNames.numbers(3)
    assert not names.given and names.given_name(1) == "" and names.file(1) == "client_001"
    assert names.text([1]) == "client 1" and ClientNames(["A", "B"]).text([0, 1]) == "clients A, B"


def test_an_empty_name_is_refused_and_names_that_are_nearly_the_same_are_named():
    with pytest.raises(InvalidArgumentError, match="client_names is ' ', but must be a name"):
        ClientNames(["A", " "]).check("Data")
    with pytest.warns(UserWarning, match="are different clients: 'ward' and 'Ward'"):
        ClientNames(["ward", "Ward", "B"]).check("Data")


@pytest.mark.parametrize("given", ["B", 1, "1"])
def test_a_client_is_found_by_its_name_or_number(given):
    assert ClientNames(["A", "B"]).number("Federation", given) == 1


@pytest.mark.parametrize("given", ["C", 2, "-1"])
def test_a_client_that_is_not_there_is_refused(given):
    with pytest.raises(InvalidArgumentError, match="must be one of A, B, or a number from 0 to 1"):
        ClientNames(["A", "B"]).number("Federation", given)
