"""Map-style datasets and LightningDataModules are dealt to clients; batches are what their collate functions make."""

import json

import numpy as np
import pytest
import torch
from helpers.data import assert_names_an_argument, set_up
from helpers.map_style import DictData, Dicts, Noisy, images, padded
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch.utils.data import ConcatDataset, DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler
from torchvision.transforms import v2

from fedmoe_pl.data import (
    IID,
    Digits,
    Dirichlet,
    FromDataModule,
    FromDatasets,
    NaturalIds,
    PredefinedIndices,
    RandomCrop,
)
from fedmoe_pl.evaluation.outputs import labelled_batches

FLIP = v2.RandomHorizontalFlip()


def epochs(data, seed=1, number=2, samples=None):
    """Training batches of client 0."""
    samples = data.train_samples[0] if samples is None else samples
    batches = data.batches(samples, generator=torch.Generator().manual_seed(seed), augment=True)
    return [batch for _ in range(number) for batch in batches]


def test_a_dataset_with_transforms_is_dealt_by_its_classes():
    train, test = images(transforms=[FLIP]), images(9, offset=100)
    arguments = {"partitioner": Dirichlet(5.0), "num_clients": 3, "test_fraction": 0.25, "batch_size": 4}
    data = set_up(FromDatasets(train, test, **arguments))
    assert data.y.tolist() == [y for _, y in (*train, *test)]
    assert data.num_classes == 3 and len(data.global_test) == 9
    x, y = next(iter(data.test_dataloader()))
    assert torch.equal(x, torch.stack([x for x, _ in test])[:4]) and y.tolist() == [y for _, y in test][:4]
    first, again, other = epochs(data), epochs(data), epochs(data, seed=2)
    for (x, _), (same, _) in zip(first, again, strict=True):
        assert torch.equal(x, same)
    assert len(first) == len(other) and not all(torch.equal(a[0], b[0]) for a, b in zip(first, other, strict=False))


def test_random_transforms_follow_from_the_seed_of_a_batch_alone():
    data = set_up(FromDatasets(Noisy(12), Noisy(3), num_clients=1, batch_size=5))
    in_turn = epochs(data)
    state = torch.get_rng_state(), np.random.get_state()[1].tolist()
    data.reader.data.num_workers = 2
    by_workers = epochs(data)
    assert torch.equal(torch.get_rng_state(), state[0]) and np.random.get_state()[1].tolist() == state[1]
    assert len(in_turn) == len(by_workers) == 6
    for (x, y), (same, classes) in zip(in_turn, by_workers, strict=True):
        assert torch.equal(x, same) and torch.equal(y, classes)
    values = torch.cat([x for x, _ in in_turn])
    assert len(values.unique(dim=0)) == 24, "every epoch draws anew"
    x = [torch.cat([x for x, _ in data.batches(data.train_samples[0])]) for _ in range(2)]
    assert torch.equal(*x), "what is evaluated does not change"


def test_an_iteration_that_is_broken_off_leaves_the_workers_usable():
    data = set_up(FromDatasets(Noisy(12), Noisy(3), num_clients=1, batch_size=2, num_workers=1))
    expected = [y.tolist() for _, y in epochs(data, number=1)]
    batches = data.batches(data.train_samples[0], generator=torch.Generator().manual_seed(1), augment=True)
    broken = iter(batches)
    next(broken)
    inside = [y.tolist() for _, y in epochs(data, number=1)]
    del broken
    assert inside == expected == [y.tolist() for _, y in epochs(data, number=1)]


def test_what_is_held_out_is_read_from_the_dataset_without_random_transforms():
    data = set_up(FromDatasets(Noisy(12), Noisy(3), Noisy(12, noise=0), num_clients=1, test_fraction=0.5))
    (x, _), *_ = data.batches(data.test_samples[0])
    assert x[:, 0].tolist() == data.test_samples[0].tolist()
    assert epochs(data)[0][0][0, 0] % 1 != 0


def test_tensors_in_memory_stay_the_fast_way():
    x, y = torch.rand(9, 2), torch.arange(9) % 3
    parts = Subset(TensorDataset(x, y), [1, 3, 5, 7]), TensorDataset(x, y)
    data = set_up(FromDatasets(*parts, num_clients=2))
    assert data.reader is None and torch.equal(data.x, torch.cat((x[1::2], x)))
    assert set_up(FromDatasets(*parts, num_clients=2, collate_fn=padded_pairs)).reader is not None
    pooled = FromDatasets(parts[1], Subset(parts[1], []), pool=True, test_fraction=0.5, num_clients=2)
    assert set_up(pooled).reader is None and len(pooled.y) == 9
    true = set_up(FromDatasets(*(2 * [TensorDataset(x, y > 0)]), num_clients=2))
    assert true.reader is None and true.num_classes == 2 and true.y[:3].tolist() == [0, 1, 1]
    double = TensorDataset(x.double(), y)
    assert set_up(FromDatasets(double, double, num_clients=2)).reader is not None, "its type is not changed"


def padded_pairs(samples):
    return torch.utils.data.default_collate(samples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_targets_that_are_no_classes_pass_through_untouched(dtype):
    x, y = torch.rand(8, 2), torch.arange(16).view(8, 2).to(dtype)
    in_memory = set_up(FromDatasets(TensorDataset(x, y), TensorDataset(x, y), num_clients=2))
    one_by_one = set_up(FromDatasets([*zip(x, y, strict=True)], [*zip(x, y, strict=True)], num_clients=2))
    for data in (in_memory, one_by_one):
        assert data.num_classes == 0 and data.class_shares.shape == (2, 0)
        (batch,) = data.batches(torch.tensor([3, 9]))
        assert torch.equal(batch[1], y[[3, 1]]) and batch[1].dtype == dtype
    pooled = set_up(FromDatasets(TensorDataset(x, y[:, 0].float()), pool=True, num_clients=2, test_fraction=0.5))
    assert pooled.y.tolist() == y[:, 0].tolist() and not pooled.num_classes


def test_targets_in_dicts_that_are_no_classes_are_named_by_their_key():
    samples: list = [{"x": torch.ones(2), "y": torch.tensor([index, 0.5])} for index in range(4)]
    data = set_up(FromDatasets(samples, samples, targets="y", num_clients=2))
    assert not data.num_classes and not data.has_pairs
    (_, targets), *_ = labelled_batches(data, torch.tensor([3, 1]))
    assert targets[:, 0].tolist() == [3, 1]


def test_classes_and_groups_come_from_attributes_keys_or_functions():
    def users(dataset):
        return [f"hospital {index % 4}" for index in range(len(dataset))]

    data = set_up(FromDatasets(Dicts(12), Dicts(6), targets="label", groups="user", collate_fn=padded))
    assert data.num_clients == 3 and data.num_classes == 2 and data.y.tolist() == [0, 1] * 9
    assert [part.tolist() for part in data.test_samples] == [[12, 15], [13, 16], [14, 17]]
    assert next(iter(data.batches(data.train_samples[0])))["users"] == ["user 0"] * 4
    data = set_up(FromDatasets(Noisy(12), Noisy(4), groups=users, partitioner=NaturalIds()))
    assert data.num_clients == 4
    parts = ConcatDataset([Subset(Noisy(12), [5, 4]), Noisy(3)])
    assert set_up(FromDatasets(parts, Noisy(3), num_clients=1)).y.tolist() == [2, 1, 0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("kind", ["list.json", "object.json", "arrays.npz", "function"])
def test_indices_come_from_a_file_or_a_function(kind, tmp_path):
    parts = {"a": [3, 1], "b": [0, 5, 4]}
    path = str(tmp_path / kind)
    if kind == "arrays.npz":
        np.savez(path, **parts)
    elif kind != "function":
        (tmp_path / kind).write_text(json.dumps(parts if kind == "object.json" else [*parts.values()]))
    partitioner = PredefinedIndices((lambda labels: parts.values()) if kind == "function" else path)
    data = set_up(FromDatasets(Noisy(6), Noisy(3), partitioner=partitioner))
    assert [part.tolist() for part in data.train_samples] == [[3, 1], [0, 5, 4]]


def test_a_lightning_data_module_keeps_its_batches():
    data = set_up(FromDataModule(DictData(), targets="label", num_clients=3, test_fraction=0.2))
    assert data.batch_size == 4 and not data.has_pairs and data.num_classes == 2
    assert len(data.global_test) == 10
    (batch, *_) = epochs(data)
    assert batch.keys() == {"words", "label", "users"} and len(batch["users"]) == 4
    assert set_up(FromDataModule(DictData(), batch_size=7, num_clients=3)).batch_size == 7


class Stream(IterableDataset):
    def __iter__(self):
        yield from ()


def test_what_cannot_be_dealt_is_refused_in_one_sentence(tmp_path):
    class OnDevice(DictData):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    class Weighted(DictData):
        def train_dataloader(self):
            return DataLoader(self.training, sampler=WeightedRandomSampler([1.0] * 22, 22), collate_fn=padded)

    class Streaming(DictData):
        def train_dataloader(self):
            return DataLoader(Stream())

    class Listed(DictData):
        def train_dataloader(self):
            return [DataLoader(Dicts(3)), DataLoader(Dicts(3))]

    class NeedsTrainer(DictData):
        def setup(self, stage):
            assert self.trainer is not None, "no trainer"

    class Whole(DictData):
        def train_dataloader(self):
            return DataLoader(self.training, batch_size=None)

    def broken(dataset):
        raise KeyError("labels")

    (tmp_path / "twice.json").write_text("[[0, 1], [1]]")
    (tmp_path / "beyond.json").write_text("[[0, 12]]")
    (tmp_path / "words.json").write_text('{"a": "0 1"}')
    two, in_file = {"num_clients": 2}, lambda name: PredefinedIndices(str(tmp_path / name))
    faults = {
        r"train_dataset is a Stream, but must be a map-style": lambda: FromDatasets(Stream(), Noisy(3), **two),
        r"train_dataset is empty": lambda: FromDatasets(Noisy(0), Noisy(3), **two),
        r"test_dataset is None, but must": lambda: FromDatasets(Noisy(3), **two),
        r"eval_dataset is of 4 samples": lambda: FromDatasets(Noisy(3), Noisy(3), Noisy(4), **two),
        r"targets is 'classes', but must": lambda: FromDatasets(Noisy(3), Noisy(3), targets="classes", **two),
        r"targets is broken, but must": lambda: FromDatasets(Noisy(3), Noisy(3), targets=broken, **two),
        r"targets is <lambda>, which gives values of shape \(1,\)": lambda: FromDatasets(
            Noisy(3), Noisy(3), targets=lambda dataset: [0], **two
        ),
        r"targets gives \[1, 1\] for the first": lambda: FromDatasets(
            Noisy(3), Noisy(3), targets=lambda dataset: [1] * 3, **two
        ),
        r"whose samples must be readable and fit collate_fn": lambda: FromDatasets(Dicts(4), Dicts(4), **two),
        r"augmentation must be left out": lambda: FromDatasets(Noisy(4), Noisy(4), augmentation=[RandomCrop()], **two),
        r"rotations must be left out": lambda: FromDatasets(Noisy(4), Noisy(4), rotations=[0, 180], **two),
        r"partitioner is Dirichlet, which deals classes": lambda: FromDatasets(
            Dicts(4), Dicts(4), collate_fn=padded, partitioner=Dirichlet(0.5), **two
        ),
        r"stratify is True, but must be False": lambda: FromDatasets(
            Dicts(4), Dicts(4), collate_fn=padded, stratify=True, test_fraction=0.5, **two
        ),
        r"global_test_size is 9, but must be at most 4": lambda: FromDatasets(
            Dicts(4), Dicts(4), collate_fn=padded, global_test_size=9, **two
        ),
        r"num_workers is -1": lambda: FromDatasets(Noisy(4), num_workers=-1),
        r"groups is 'site', but must": lambda: FromDatasets(Noisy(4), Noisy(4), groups="site"),
        r"indices is '.*twice.json', which has the index 1 twice": lambda: FromDatasets(
            Noisy(4), Noisy(4), partitioner=in_file("twice.json")
        ),
        r"targets has torch.int64 numbers from -1, but .*; values that are no classes, such as": lambda: FromDatasets(
            Noisy(3), Noisy(3), targets=lambda dataset: [-1, 0, 1], **two
        ),
        r"has the index 12, but must": lambda: FromDatasets(Noisy(4), Noisy(4), partitioner=in_file("beyond.json")),
        r"indices is '<lambda>', but must give client 1 at least one sample": lambda: FromDatasets(
            Noisy(4), Noisy(4), partitioner=PredefinedIndices(lambda labels: [[0], []])
        ),
        r"must give client 0 a list": lambda: FromDatasets(Noisy(4), Noisy(4), partitioner=in_file("words.json")),
        r"indices is '.*none.json', but must be": lambda: in_file("none.json"),
        r"num_clients is 5, but must be None or 1": lambda: FromDatasets(
            Noisy(13), Noisy(4), partitioner=in_file("beyond.json"), num_clients=5
        ),
        r"datamodule is a Digits, which deals": lambda: FromDataModule(Digits()),
        r"which overrides on_after_batch_transfer": lambda: FromDataModule(OnDevice()),
        r"train_dataloader has a WeightedRandomSampler": lambda: FromDataModule(Weighted(), **two),
        r"train_dataloader has the batch_size None": lambda: FromDataModule(Whole(), **two),
        r"whose setup\('fit'\) must work without": lambda: FromDataModule(NeedsTrainer(), **two),
        r"train_dataset is a Stream": lambda: FromDataModule(Streaming(), **two),
        r"train_dataloader returns a list": lambda: FromDataModule(Listed(), **two),
        r"eval_dataset is 'plain', but must": lambda: FromDataModule(DictData(), eval_dataset="plain", **two),
        r"batch_size is 0": lambda: FromDataModule(DictData(), batch_size=0),
    }
    for message, make in faults.items():
        with pytest.raises(MisconfigurationException, match=message) as error:
            made = make()
            made.setup()
        assert_names_an_argument(str(error.value))


def test_own_partitioners_say_whether_they_need_classes():
    class Halves(IID):
        def partition(self, labels, num_clients, rng):
            return np.array_split(np.arange(len(labels)), num_clients)

    data = set_up(FromDatasets(Dicts(4), Dicts(4), collate_fn=padded, partitioner=Halves(), num_clients=2))
    assert [part.tolist() for part in data.train_samples] == [[0, 1], [2, 3]]
