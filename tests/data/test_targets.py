"""Where the classes and groups of samples are found."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.data import set_up
from torch.utils.data import Dataset, Subset

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import FromDatasets
from fedmoe_pl.data.map_style import check_groups
from fedmoe_pl.data.targets import Samples, classes_of, values_of


class Dictionaries(Dataset):
    """Dicts whose several labels are an attribute of the same name, too."""

    def __init__(self):
        self.labels = torch.arange(12.0).view(6, 2)

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return {"x": torch.ones(3), "labels": self.labels[index]}


def test_targets_of_dicts_may_be_an_attribute_of_the_same_name():
    data = set_up(FromDatasets(Dictionaries(), Dictionaries(), targets="labels", num_clients=2))
    assert not data.num_classes and data.reader is not None and data.reader.has_targets


class Transformed(Dataset):
    """Like torchvision's datasets: its attribute has the targets before the transform."""

    def __init__(self):
        self.targets, self.user = [0, 1, 2, 3], ["a", "a", "b", "b"]
        self.target_transform = lambda target: 3 - target

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return torch.ones(3), self.target_transform(self.targets[index])


def test_targets_are_those_after_their_transform_and_groups_have_none():
    for dataset in (Transformed(), Subset(Transformed(), range(4))):
        data = set_up(FromDatasets(dataset, Transformed(), groups="user"))
        assert data.y.tolist() == 2 * [3, 2, 1, 0] and data.num_clients == 2


class Numbered(Dataset):
    """Gives classes, although its attribute has something else."""

    def __init__(self, targets):
        self.targets = targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return torch.ones(3), index % 2


@pytest.mark.parametrize("targets", [["cat", "dog"] * 2, [[0], [1, 2], [], [3]], [[1, 0]] * 4])
def test_classes_are_those_of_samples_if_the_attribute_has_none(targets):
    for dataset in (Numbered(targets), Subset(Numbered(targets), range(4))):
        assert set_up(FromDatasets(dataset, Numbered(targets), num_clients=2)).y.tolist() == 4 * [0, 1]


@pytest.mark.parametrize("missing", [float("nan"), None])
@pytest.mark.parametrize("group", ["a", b"a", 1])
def test_a_sample_without_a_group_is_named(missing, group):
    dataset = Transformed()
    dataset.user = [group, missing, group, missing]
    refusal = f"groups is 'user', but must be a group of each sample, because sample 1 of train_dataset has {missing}."
    for each in (dataset, Subset(dataset, range(4))):
        with pytest.raises(InvalidArgumentError, match=re.escape(refusal)):
            FromDatasets(each, Transformed(), groups="user").setup()


def test_pandas_na_and_nat_are_no_groups():
    for ids, missing in ((np.array(["a", pd.NA]), "<NA>"), (np.array(["2026", "NaT"], "M8[ns]"), "NaT")):
        with pytest.raises(InvalidArgumentError, match=f"sample 1 of test_dataset has {missing}"):
            check_groups("data", "user", ids, "test", 2)


@pytest.mark.parametrize("groups", [["None", "nan", "None", "NaT"], ["ü".encode(), b"a", b"a", b"b"]])
def test_groups_may_be_called_nan_or_be_bytes(groups):
    dataset = Transformed()
    dataset.user = groups
    assert set_up(FromDatasets(dataset, dataset, groups="user")).num_clients == 3


def test_true_and_false_are_classes():
    samples = [(torch.ones(3), torch.tensor(index % 2 == 1)) for index in range(6)]
    for collate_fn in (None, lambda batch: torch.utils.data.default_collate(batch)):
        data = set_up(FromDatasets(samples, samples, num_clients=2, collate_fn=collate_fn))
        assert data.num_classes == 2 and data.y.tolist() == 6 * [0, 1]


class Table(Dataset):
    """Has columns as a Hugging Face dataset has them; a sample may also be what a function of the user's makes."""

    column_names = ("x", "labels", "client")

    def __init__(self, kind, read):
        self.format, self.read = {"type": kind}, read

    def __len__(self):
        return 4

    def __getitem__(self, key):
        columns = {"x": [[0.0]] * 4, "labels": [0, 1, 1, 0], "client": ["b", "a", "b", "a"]}
        if isinstance(key, str):
            return columns[key]
        self.read.append(key)
        sample = {name: values[key] for name, values in columns.items()}
        return {**sample, "labels": 1 - sample["labels"]} if self.format["type"] == "custom" else sample


def test_a_column_of_a_table_is_read_at_once_unless_a_function_makes_samples():
    for kind, labels in ((None, [0, 1, 1, 0]), ("custom", [1, 0, 0, 1])):
        read = []
        samples = Samples("data", Table(kind, read), ("labels", "client"))
        classes = classes_of(samples, "labels")
        assert classes is not None and classes.tolist() == labels
        assert values_of(samples, "groups", "client").tolist() == ["b", "a", "b", "a"]
        assert [*map(read.count, (1, 2, 3))] == 3 * [0 if kind is None else 1]  # the first sample shows the keys
