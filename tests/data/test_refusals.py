"""What would give wrong data is refused by its argument, in one line: arguments, arrays, files and data sets."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from helpers.data import Own, numbered, pixels, random_images, refused_argument, vectors
from helpers.map_style import DictData, Dicts, Noisy, padded
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import IterableDataset, TensorDataset

from fedmoe_pl import data

NAN = float("nan")
NOT_OPTIONAL = ("batch_size", "partition_seed", "test_fraction", "validation_fraction")
TEN = np.arange(100) % 10


def of_ten(partitioner, num_clients, labels=TEN):
    return lambda: partitioner(labels, num_clients, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("alpha", lambda: data.Dirichlet(0)),
        ("samples_per_client", of_ten(data.ClientDirichlet(1, 21), 5)),
        ("minimum_samples", of_ten(data.BalancedDirichlet(1, 21), 5)),
        ("minimum_samples", of_ten(data.BalancedDirichlet(1e-3, 1), 5, TEN % 1)),
        ("majority_share", lambda: data.MajorityClasses(0)),
        ("majority_share", of_ten(data.MajorityClasses(0.5, 1), 3, TEN % 2)),
        ("pairs", lambda: data.MajorityClasses(0.5, pairs="all")),  # pyright: ignore[reportArgumentType]
        ("num_clients", of_ten(data.MajorityClasses(0.5, 1, "product"), 10, TEN % 3)),
        # both clients want the one sample of class 0
        ("samples_per_client", of_ten(data.MajorityClasses(1.0, None, "product"), 2, np.array([0, 1, 1, 1]))),
        ("balance", lambda: data.TwoClasses(500, 1.0)),
        ("shards_per_client", of_ten(data.Shards(10**9), 50)),
        ("shards_per_client", lambda: data.Shards(0)),
        ("classes_per_client", lambda: data.Pathological(0)),
        ("samples_per_client", lambda: data.MajorityClasses(0.5, 0)),
        ("samples_per_client", lambda: data.TwoClasses(2.5)),  # pyright: ignore[reportArgumentType]
        # it would draw for ever
        ("samples_per_client", lambda: data.ClientDirichlet(1, 2.5)),  # pyright: ignore[reportArgumentType]
        ("p", lambda: data.RandomHorizontalFlip(50)),
        ("num_workers", lambda: data.FromDatasets(Noisy(2), Noisy(2), num_workers=-1)),
        ("global_test_size", lambda: data.Digits(global_test_size=2.5)),  # pyright: ignore[reportArgumentType]
        ("padding", lambda: data.RandomCrop(-1)),
        ("batch_size", lambda: data.Digits(batch_size=0)),
        *((name, partial(data.Digits, **{name: None})) for name in NOT_OPTIONAL),
        ("partitioner", lambda: data.Digits(partitioner=data.IID)),  # pyright: ignore[reportArgumentType]
        ("the number of classes of a client", of_ten(data.Pathological(2), 2, TEN % 1)),
        ("concentration", lambda: data.Pathological(concentration=2.0)),
        ("test_fraction", lambda: data.Digits(test_fraction=NAN)),
        ("validation_fraction", lambda: data.Digits(test_fraction=0.5, validation_fraction=0.5)),
        ("global_test_size", lambda: data.Digits(num_clients=2, global_test_size=10**9)),
        ("image_size", lambda: data.Digits(num_clients=10, image_size=-3)),
        ("rotations", lambda: data.Digits(rotations=[0, 45])),
        ("rotations", lambda: data.Digits(rotations=[0, 0])),
        ("partitioner", lambda: data.Digits(rotations=[0], partitioner=data.IID())),
    ],
)
def test_an_argument_is_refused(argument, make):
    assert refused_argument(make) == argument


IDS, TWICE = np.array([*"aab"]), numbered([0, 1, 2] * 2)


@pytest.mark.parametrize(
    ("argument", "arrays", "kwargs"),
    [
        ("num_clients", vectors(6), {"num_clients": 7}),
        ("client_train", vectors(3, client_train=[*"aab"]), {}),
        ("minimum_samples", vectors(6), {"num_clients": 5, "partitioner": data.Dirichlet(1e-3)}),
        ("num_clients", vectors(3, client_train=IDS), {"num_clients": 3}),
        ("partitioner", vectors(6), {"partitioner": data.NaturalIds()}),
        ("test_fraction", vectors(3, client_train=IDS, client_test=np.array([*"aabb"])), {"test_fraction": 0.1}),
        ("test_fraction", numbered([0, 1]), {"num_clients": 2, "pool": True}),
        ("test_fraction", vectors(40), {"num_clients": 8, "test_fraction": 0.1}),
        ("validation_fraction", vectors(40), {"num_clients": 8, "test_fraction": 0.2, "validation_fraction": 0.1}),
        ("validation_fraction", TWICE, {"num_clients": 1, "validation_fraction": 0.2, "stratify": True}),
        ("pool", numbered([0, 1, 2], [0], client_train=IDS), {"pool": True, "test_fraction": 0.5}),
        ("global_test_size", numbered([0, 1, 2], [0, 0, 0, 1, 1, 2]), {"num_clients": 1, "global_test_size": 6}),
        ("num_clients", random_images(), {"num_clients": 26, "rotations": [0, 180]}),
        ("rotations", numbered([0, 1, 2], client_train=IDS), {"num_clients": 2, "rotations": [0]}),
        ("client_train", vectors(3, client_train=np.array(["a", None, "a"], dtype=object)), {}),
        ("augmentation", vectors(6), {"num_clients": 2, "augmentation": [data.RandomCrop()]}),
        ("augmentation", vectors(6), {"num_clients": 2, "augmentation": [data.RandomHorizontalFlip()]}),
    ],
)
def test_data_that_cannot_be_dealt_as_the_arguments_ask_are_refused(argument, arrays, kwargs):
    made = Own(arrays, **kwargs)
    for _ in range(2):  # a second attempt does not find a half-made data module
        assert refused_argument(lambda: made) == argument


def test_a_client_without_samples_is_refused_with_what_helps(monkeypatch):
    parts = [np.arange(3), np.arange(0), np.arange(3, 6)]
    monkeypatch.setattr(data.MajorityClasses, "partition", lambda *_: parts)
    because = "because MajorityClasses gives client 1 of 3 no training samples; another partition_seed may help, too."
    with pytest.raises(MisconfigurationException, match=f"num_clients is 3, but must be lower, {because}$"):
        Own(numbered(range(6)), num_clients=3, partitioner=data.MajorityClasses(1.0, 1)).setup()


def of_images(**kwargs):
    images = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    return data.Arrays(images, torch.arange(4), images, torch.arange(4), **kwargs)


@pytest.mark.parametrize(
    ("arrays", "argument"),
    [
        (of_images(mean=[0.0] * 3), "mean"),
        (of_images(mean=[0.0] * 3, std=[1.0]), "std"),
        (of_images(mean=[0.0] * 3, std=[1.0, 0.0, 1.0]), "std"),
        (vectors(6, mean=[0.5], std=[0.5]), "mean"),
    ],
)
def test_a_wrong_normalization_is_refused(arrays, argument):
    assert refused_argument(lambda: Own(arrays, num_clients=1)) == argument


GOOD = {"x_train": np.ones((4, 5)), "y_train": [0, 1, 0, 1], "x_test": np.ones((2, 5)), "y_test": [0, 1]}
ARRAYS = {  # what is wrong in an .npz file, and the argument
    "a label of 10**9": ({"y_train": [0, 1, 0, 10**9]}, "y_train"),
    "a label of 1.7": ({"y_train": [0, 1, 0, 1.7]}, "y_test"),
    "a label that is nan": ({"y_train": [0, 1, 0, NAN]}, "y_train[3]"),
    "words as labels": ({"y_train": ["cat", "dog", "cat", "dog"]}, "y_train"),
    "too few labels": ({"y_train": [0, 1]}, "y_train"),
    "no test samples": ({"x_test": np.ones((0, 5)), "y_test": np.zeros(0, int)}, "x_test"),
    "too large for float32": ({"x_test": np.full((2, 5), 1e300)}, "x_test[0, 0]"),
    "complex numbers": ({"x_train": np.ones((4, 5), complex)}, "x_train"),
    "integers that are no words": ({"x_train": np.ones((4, 2, 2), int)}, "x_train"),
    "two channels": ({"x_train": pixels(4, 2, 2, 2)}, "x_train"),
    "another width": ({"x_test": np.ones((2, 6))}, "x_test"),
    "a client that is nan": ({"client_train": [0, 1, NAN, NAN]}, "client_train"),
    "ids in a column": ({"client_train": [[0], [1], [0], [1]]}, "client_train"),
}


@pytest.mark.parametrize("fault", ARRAYS)
def test_a_fault_in_arrays_is_refused(fault, tmp_path):
    changes, argument = ARRAYS[fault]
    path = tmp_path / "own.npz"
    np.savez(path, **(GOOD | changes))
    assert refused_argument(lambda: data.NpzFile(str(path), num_clients=2)) == argument


def test_words_have_neither_a_mean_nor_a_size(tmp_path):
    path, words, labels = str(tmp_path / "own.npz"), np.ones((4, 3), np.int64), np.zeros(4, np.int64)
    np.savez(path, x_train=words, y_train=labels, x_test=words, y_test=labels)
    for arguments, argument in (({"mean": (0.5,), "std": (0.5,)}, "mean"), ({"image_size": 4}, "image_size")):
        assert refused_argument(lambda arguments=arguments: data.NpzFile(path, num_clients=1, **arguments)) == argument


class Stream(IterableDataset):
    def __iter__(self):
        return iter([{"label": 0}])


def of_noise(**arguments):
    return lambda: data.FromDatasets(Noisy(4), Noisy(4), **{"num_clients": 2, **arguments})


def of_dicts(**arguments):
    return lambda: data.FromDatasets(Dicts(4), Dicts(4), collate_fn=padded, num_clients=2, **arguments)


def of_indices(lists):
    return of_noise(num_clients=None, partitioner=data.PredefinedIndices(lambda labels: lists))


class ReadOneByOne(data.FederatedDataModule):
    def load(self):
        return data.MapStyleData(Noisy(3), Noisy(3), client_train=np.array([0, NAN, NAN]))


class OnDevice(DictData):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("test_dataset", lambda: data.FromDatasets(Noisy(3), num_clients=2)),
        ("test_dataset", lambda: data.FromDatasets(TensorDataset(torch.rand(4, 2), torch.arange(4)), num_clients=2)),
        ("train_dataset", lambda: data.FromDatasets(Stream(), Noisy(3), targets="label", num_clients=2)),
        ("test_dataset", lambda: data.FromDatasets(Noisy(3), Stream(), num_clients=2)),
        ("eval_dataset", of_noise(eval_dataset=Noisy(5))),
        ("targets", of_noise(targets=lambda dataset: [0])),
        ("targets", of_noise(targets=lambda dataset: [0.5] * 4)),
        ("targets[0]", of_noise(targets=lambda dataset: [1] * 4)),  # the batches have others
        ("targets[2]", of_noise(targets=lambda dataset: [0, 1, 3, 0])),
        ("targets", of_noise(targets=lambda dataset: [-1, 0, 1, 2])),
        ("targets", of_dicts(targets="lable")),
        ("targets", of_noise(targets="labels")),  # samples are pairs
        ("groups", of_noise(groups="writer")),
        ("groups", lambda: ReadOneByOne()),
        ("groups", of_dicts(groups="users")),
        ("augmentation", of_noise(augmentation=[data.RandomCrop()])),
        ("partitioner", of_dicts(partitioner=data.Dirichlet(0.5))),
        ("global_test_size", of_dicts(global_test_size=9)),
        ("indices", of_indices([[0, 1], [1]])),
        ("indices", of_indices([[0, 12]])),
        ("indices", of_indices([[0], []])),
        ("indices", of_indices([1, 2, 3])),
        ("indices", of_indices({})),
        ("num_clients", of_noise(num_clients=5, partitioner=data.PredefinedIndices(lambda labels: [[0], [1]]))),
        ("datamodule", lambda: data.FromDataModule(OnDevice(), num_clients=2)),
        ("batch_size", lambda: data.FromDataModule(DictData(), batch_size=0)),
        ("eval_dataset", lambda: data.FromDataModule(DictData(), "trian_plain", targets="label", num_clients=2)),
    ],
)
def test_datasets_that_cannot_be_dealt_are_refused(argument, make):
    assert refused_argument(make) == argument


@pytest.mark.parametrize(
    ("wrong", "argument"), [([1.7], "root"), ([10**30], "root"), ([1, 2], "root"), ([-1], "y_train")]
)
def test_a_fault_of_a_writer_of_leaf_is_refused(wrong, argument, tmp_path):
    for part, samples in (("train", {"y": wrong}), ("test", {})):
        content = {"users": ["a"], "user_data": {"a": {"x": [[0.5] * 784], "y": [1], **samples}}}
        (tmp_path / part).mkdir()
        (tmp_path / part / "all.json").write_text(json.dumps(content))
    assert refused_argument(lambda: data.FEMNIST(str(tmp_path))) == argument


@pytest.mark.parametrize("text", ["", '{"users": ["a"], "user', "[]", '{"users": ["a"], "user_data": {}}'])
def test_a_file_that_is_not_leaf_s_is_named(text, tmp_path):
    (tmp_path / "train").mkdir()
    assert refused_argument(lambda: data.FEMNIST(str(tmp_path))) == "root", "without any file"
    (tmp_path / "train" / "all.json").write_text(text)
    with pytest.raises(MisconfigurationException, match=r"FEMNIST: '.*/train/all\.json' cannot be read: "):
        data.FEMNIST(str(tmp_path)).setup()


@pytest.mark.parametrize("row", ['"5","title","text"', '"1","title"'])
def test_a_fault_in_a_file_of_texts_is_refused(row, tmp_path):
    (tmp_path / "test.csv").write_text('"1","title","text"')
    (tmp_path / "train.csv").write_text(row)
    assert refused_argument(lambda: data.AGNews(str(tmp_path), num_clients=1)) == "root"


def test_samples_that_the_collate_function_cannot_join_are_refused():
    words = data.FromDatasets(Dicts(4), Dicts(4), num_clients=2)  # sequences of several lengths
    with pytest.raises(MisconfigurationException, match="FromDatasets: collate_fn makes no batch of the first"):
        words.setup()
