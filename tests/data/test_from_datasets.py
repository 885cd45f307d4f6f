"""Map-style datasets and LightningDataModules are dealt to clients; batches are what their collate functions make."""

import gc
import json
import multiprocessing

import numpy as np
import pytest
import torch
import yaml
from helpers import map_style
from helpers.data import set_up
from helpers.map_style import DictData, Dicts, Noisy, images, padded
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import ConcatDataset, Subset, TensorDataset
from torchvision.transforms import v2

from fedmoe_pl.data import (
    IID,
    Dirichlet,
    FederatedDataModule,
    FromDataModule,
    FromDatasets,
    NaturalIds,
    PredefinedIndices,
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
    first, other = ([x for x, _ in epochs(data, seed)] for seed in (1, 2))
    assert len(first) == len(other) and not all(map(torch.equal, first, other))


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


class Damaged(Noisy):
    def __getitem__(self, index):
        if index == 3:
            raise OSError("image file is truncated")
        return super().__getitem__(index)


def test_a_sample_that_cannot_be_read_is_named():
    data = set_up(FromDatasets(Noisy(12), Damaged(5), num_clients=1, batch_size=2))
    with pytest.raises(RuntimeError, match=r"^sample 3 of Damaged: image file is truncated\.$"):
        epochs(data, samples=data.global_test)


def test_an_iteration_that_is_broken_off_leaves_the_workers_usable():
    data = set_up(FromDatasets(Noisy(12), Noisy(3), num_clients=1, batch_size=2, num_workers=1))
    expected = [y.tolist() for _, y in epochs(data, number=1)]
    batches = data.batches(data.train_samples[0], generator=torch.Generator().manual_seed(1), augment=True)
    broken = iter(batches)
    next(broken)
    inside = [y.tolist() for _, y in epochs(data, number=1)]
    del broken
    assert inside == expected == [y.tolist() for _, y in epochs(data, number=1)]


def test_processes_that_read_samples_end_by_themselves_where_references_form_cycles():
    before = multiprocessing.active_children()
    data = set_up(FromDatasets(Noisy(12), Noisy(3), num_clients=1, batch_size=2, num_workers=2))
    data.itself = [data]
    epochs(data, number=1)
    assert len([*data.batches(data.global_test)]) == 2
    workers = [process for process in multiprocessing.active_children() if process not in before]
    del data
    gc.collect()
    assert [process.exitcode for process in workers] == [0] * 4, "they were not killed, which takes five seconds each"


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


@pytest.mark.parametrize("kind", ["list.json", "object.json", "arrays.npz", "function", "lists"])
def test_indices_come_from_lists_a_file_or_a_function(kind, tmp_path):
    parts = {"b": [3, 1], "a": [0, 5, 4]}
    path = str(tmp_path / kind)
    if kind == "arrays.npz":
        np.savez(path, **parts)
    elif kind.endswith("json"):
        (tmp_path / kind).write_text(json.dumps(parts if kind == "object.json" else [*parts.values()]))
    others = {"function": lambda labels: parts.values(), "lists": parts}
    partitioner = PredefinedIndices(others.get(kind, path))
    data = set_up(FromDatasets(Noisy(6), Noisy(3), partitioner=partitioner))
    assert [part.tolist() for part in data.train_samples] == [[3, 1], [0, 5, 4]]
    assert [*data.client_names] == (["b", "a"] if kind in ("object.json", "arrays.npz", "lists") else ["0", "1"])


def test_a_lightning_data_module_keeps_its_batches():
    data = set_up(FromDataModule(DictData(), targets="label", num_clients=3, test_fraction=0.2))
    assert data.batch_size == 4 and not data.has_pairs and data.num_classes == 2
    assert len(data.global_test) == 10
    (batch, *_) = epochs(data)
    assert batch.keys() == {"words", "label", "users"} and len(batch["users"]) == 4
    assert set_up(FromDataModule(DictData(), batch_size=7, num_clients=3)).batch_size == 7


def test_own_partitioners_say_whether_they_need_classes():
    class Halves(IID):
        def partition(self, labels, num_clients, rng):
            return np.array_split(np.arange(len(labels)), num_clients)

    data = set_up(FromDatasets(Dicts(4), Dicts(4), collate_fn=padded, partitioner=Halves(), num_clients=2))
    assert [part.tolist() for part in data.train_samples] == [[0, 1], [2, 3]]


def test_a_collate_function_that_leaves_samples_out_is_refused():
    samples: list = [(torch.ones(2), None if index % 3 == 0 else torch.tensor([index, 0.5])) for index in range(6)]

    def keep(batch):
        return torch.utils.data.default_collate([sample for sample in batch if sample[1] is not None])

    data = set_up(FromDatasets(samples, samples, num_clients=2, collate_fn=keep))
    with pytest.raises(MisconfigurationException, match="collate_fn makes 2 samples of 3, but must keep all"):
        list(labelled_batches(data, torch.tensor([0, 1, 2])))


@pytest.mark.parametrize("without", ["train", "test"])
def test_a_warning_tells_that_only_one_dataset_has_classes(without):
    of_classes = [(torch.zeros(5), number % 3) for number in range(12)]
    named = [(x, f"class {number}") for x, number in of_classes]
    parts = (named, of_classes) if without == "train" else (of_classes, named)
    datamodule = FromDatasets(*parts, num_clients=2, partitioner=IID())
    with pytest.warns(UserWarning, match=f"and not those of {without}_dataset, so no accuracies are computed"):
        datamodule.setup()
    assert not datamodule.num_classes


# By bare class names in a YAML


OWN_YAML = """
data:
  class_path: FromDatasets
  init_args:
    train_dataset:
      class_path: torchvision.datasets.FakeData
      init_args: {size: 6, image_size: [3, 4, 4], num_classes: 2, transform: helpers.map_style.to_tensor}
    test_dataset: {class_path: helpers.map_style.Noisy, init_args: {size: 3}}
    targets: targets
    groups: helpers.map_style.users
    collate_fn: helpers.map_style.padded
    num_workers: 1
"""
LIGHTNING_YAML = """
data:
  class_path: FromDataModule
  init_args:
    datamodule: {class_path: helpers.map_style.DictData, init_args: {batch_size: 3}}
    targets: label
    test_fraction: 0.5
    partitioner: {class_path: PredefinedIndices, init_args: {indices: helpers.map_style.halves}}
"""


# jsonargparse deprecates what lightning 2.6.6 uses
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_own_data_can_be_written_in_yaml(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])  # LightningCLI warns of arguments besides `args`

    def read(text):
        model = "model: lightning.pytorch.demos.boring_classes.BoringModel"
        (tmp_path / "run.yaml").write_text(f"seed_everything: 0\n{model}\n{text}")
        arguments = {"subclass_mode_model": True, "subclass_mode_data": True, "run": False}
        path = str(tmp_path / "run.yaml")
        cli = LightningCLI(LightningModule, FederatedDataModule, args=["--config", path], **arguments)
        written = yaml.safe_load(cli.parser.dump(cli.config))["data"]["init_args"]  # as in a run's config.yaml
        assert written["targets"] == cli.datamodule.targets
        assert written.get("groups") == (None if cli.datamodule.groups is None else "helpers.map_style.users")
        return cli.datamodule

    datasets = read(OWN_YAML)
    assert isinstance(datasets, FromDatasets) and isinstance(datasets.test_dataset, map_style.Noisy)
    assert (datasets.targets, datasets.groups, datasets.num_workers) == ("targets", map_style.users, 1)
    assert datasets.collate_fn is map_style.padded and datasets.train_dataset[0][0].shape == (3, 4, 4)
    scans = read(LIGHTNING_YAML)
    assert isinstance(scans, FromDataModule) and isinstance(scans.datamodule, map_style.DictData)
    assert isinstance(scans.partitioner, PredefinedIndices) and scans.partitioner.indices is map_style.halves
    assert (scans.targets, scans.groups, scans.test_fraction) == ("label", None, 0.5)
