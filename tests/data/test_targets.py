"""Where the classes and groups of samples are found; classes that datasets number differently are joined by name."""

import re

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.data import set_up
from lightning.pytorch import LightningDataModule
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset
from torchvision.datasets import ImageFolder
from torchvision.transforms.functional import to_tensor

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import FromDataModule, FromDatasets
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


LACKING = [([group, missing] * 2, missing) for group in ("a", b"a", 1) for missing in (float("nan"), None)]
LACKING += [(np.array(["a", pd.NA] * 2), "<NA>"), (np.array(["2026", "NaT"] * 2, "M8[ns]"), "NaT")]


@pytest.mark.parametrize(("groups", "missing"), LACKING)
def test_a_sample_without_a_group_is_named(groups, missing):
    dataset = Transformed()
    dataset.user = groups
    refusal = f"groups is 'user', but must be a group of each sample, because sample 1 of train_dataset has {missing}."
    for each in (dataset, Subset(dataset, range(4))):
        with pytest.raises(InvalidArgumentError, match=re.escape(refusal)):
            FromDatasets(each, Transformed(), groups="user").setup()


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


# Joined classes


COLORS = {"cat": 10, "dog": 20, "eel": 30, "fox": 40}  # tells what an image really shows
NAMES = {color: name for name, color in COLORS.items()}


@pytest.fixture
def folder(tmp_path):
    """Makes torchvision's dataset of a folder with three images of each class."""

    def make(*names, **kwargs):
        root = tmp_path / "-".join(names)
        for name in names:
            (root / name).mkdir(parents=True, exist_ok=True)
            for number in range(3):
                Image.new("RGB", (2, 2), (COLORS[name], 0, 0)).save(root / name / f"{number}.png")
        return ImageFolder(root, to_tensor, **kwargs)

    return make


class Wrapping(Dataset):
    """A user's own, around a part of another dataset, which is called as the user likes."""

    def __init__(self, dataset, name="dataset"):
        setattr(self, name, dataset)
        self.name = name

    def __len__(self):
        return len(getattr(self, self.name))

    def __getitem__(self, index):
        x, y = getattr(self, self.name)[index]
        return x, int(y)


class Chosen(Wrapping):
    """Some samples of another dataset, as PyTorch's Subset has them."""

    def __init__(self, dataset, indices):
        super().__init__(dataset, "base")
        self.indices = indices

    def __len__(self):
        return len(self.indices)

    def __getitem__(self, index):
        return super().__getitem__(self.indices[index])


def targets_of(dataset):
    return [target for _, target in dataset]


def numbers(data):
    """The number of each class by what its images show; a class has one, and the data module knows the same."""
    found, n = {}, len(data.y)
    for x, y in data.batches(torch.arange(n), batch_size=5):
        for color, target in zip((255 * x[:, 0, 0, 0]).round().int().tolist(), y.tolist(), strict=True):
            found.setdefault(NAMES[color], set()).add(target)
    of_training = [y.tolist() for _, y in data.batches(torch.arange(n), batch_size=n, augment=True)]
    assert data.y.tolist() == of_training[0] and all(len(each) == 1 for each in found.values()), found
    return {name: each.pop() for name, each in found.items()}


@pytest.mark.parametrize("targets", [None, "targets", targets_of], ids=["none", "attribute", "function"])
@pytest.mark.parametrize("kind", ["datasets", "datamodule"])
def test_a_test_set_without_a_class_numbers_the_others_as_the_training_set_does(kind, targets, folder):
    train, test = folder("cat", "dog", "eel"), folder("dog", "eel")
    loaders = LightningDataModule.from_datasets(train, test_dataset=test, batch_size=4)
    of_datasets = FromDatasets(train, test, targets=targets, num_clients=2)
    made = of_datasets if kind == "datasets" else FromDataModule(loaders, targets=targets, num_clients=2)
    data = set_up(made)
    assert numbers(data) == {"cat": 0, "dog": 1, "eel": 2} == data.reader.data.class_numbers
    assert data.y.tolist() == [0] * 3 + [1] * 3 + [2] * 3 + [1] * 3 + [2] * 3


PARTS = {
    "parts": lambda one, other: ConcatDataset([one, other]),
    "a part of parts": lambda one, other: Subset(ConcatDataset([one, other]), [11, 1, 5, 6, -2, 3]),
    "parts of parts": lambda one, other: ConcatDataset([Subset(one, [5, 0]), ConcatDataset([Subset(other, [4, 1])])]),
    "called otherwise": lambda one, other: ConcatDataset([Wrapping(one, "subset"), Wrapping(other, "_data")]),
    "chosen": lambda one, other: ConcatDataset([Chosen(one, [5, 0]), Chosen(Wrapping(other, "ds"), [4, 1])]),
    "transformed": lambda one, other: Wrapping(ConcatDataset([Wrapping(Subset(one, [5, 0])), other])),
}


@pytest.mark.parametrize("parts", PARTS)
def test_folders_with_a_common_class_are_joined(parts, folder):
    whole = PARTS[parts](folder("cat", "dog"), folder("dog", "fox"))
    data = set_up(FromDatasets(whole, folder("fox", "cat", "dog"), num_clients=2))
    assert numbers(data) == {"cat": 0, "dog": 1, "fox": 2} and data.num_classes == 3


def test_training_samples_without_their_transforms_have_the_same_numbers(folder):
    parts = [folder("cat", "dog"), folder("dog", "fox")]
    whole, plain = ConcatDataset(parts), ConcatDataset([Wrapping(part) for part in parts])
    data = set_up(FromDatasets(whole, folder("fox"), plain, num_clients=2))
    assert numbers(data) == {"cat": 0, "dog": 1, "fox": 2}


def hugging_face(names, labels, **columns):
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {
            "color": datasets.Value("int64"),
            "label": datasets.ClassLabel(names=names),
            **{column: datasets.ClassLabel(names=[*"xyz"]) for column in columns},
        }
    )
    made = {"color": [COLORS[names[label]] for label in labels], "label": labels, **columns}
    return datasets.Dataset.from_dict(made, features=features)


@pytest.mark.parametrize(
    "targets", ["label", lambda dataset: [each["label"] for each in dataset]], ids=["column", "function"]
)
@pytest.mark.parametrize("read", ["plain", "torch", "transform"])
def test_class_labels_of_hugging_face_in_another_order_are_joined(read, targets):
    train = hugging_face(["cat", "dog", "fox"], [0, 1, 2, 0], kind=[0, 0, 0, 1])
    test = hugging_face(["fox", "dog", "cat"], [0, 1, 2, 0], kind=[0, 0, 0, 1])
    if read == "torch":
        train, test = train.with_format("torch"), test.with_format("torch")
    elif read == "transform" and callable(targets):
        pytest.skip("a column is what the transform makes of it")
    elif read == "transform":
        train, test = (each.with_transform(lambda batch: {**batch, "seen": batch["color"]}) for each in (train, test))
    parts = ConcatDataset([train, Subset(test, [0, 2])])
    pairs = {} if targets == "label" else {"collate_fn": lambda samples: collated(samples)}
    data = set_up(FromDatasets(parts, test, targets=targets, num_clients=2, **pairs))
    assert data.y.tolist() == [0, 1, 2, 0, 2, 0, 2, 1, 0, 2]
    if targets == "label":
        (batch,) = data.batches(torch.arange(10), batch_size=10)
        assert batch["label"].tolist() == data.y.tolist()
        assert [NAMES[color] for color in batch["color"].tolist()] == [["cat", "dog", "fox"][y] for y in data.y]


def collated(samples):
    return torch.tensor([sample["color"] for sample in samples]), torch.tensor([sample["label"] for sample in samples])


class Named(Dataset):
    """Names its classes as other libraries do, or not at all."""

    def __init__(self, given, **attributes):
        self.given = given
        vars(self).update(attributes)

    def __len__(self):
        return len(self.given)

    def __getitem__(self, index):
        return torch.ones(3), self.given[index]


def test_what_has_no_names_or_other_ones_is_used_as_it_is():
    train = Named([0, 1, 2, 0], class_to_idx={"cat": 0, "dog": 1, "eel": 2})
    unnamed = (
        {},
        {"classes": None},
        {"class_to_idx": lambda: {}},
        {"classes": ["eel", "eel"]},  # of samples, not of classes
        {"classes": ["eel"]},  # not of all
        {"class_to_idx": {"eel": 0, "cat": 1}, "targets": [1, 0]},  # of other targets than those of the samples
        {"class_to_idx": {"eel": 0, "cat": 1}, "target_transform": abs},
    )
    for attributes in unnamed:
        test = Named([0, 1], **attributes)
        for each in (test, Subset(test, [0, 1])):
            data = set_up(FromDatasets(train, each, targets=targets_of, num_clients=2))
            assert data.y.tolist() == [0, 1, 2, 0, 0, 1] and data.reader.data.test_dataset is each
    named = {"classes": ["eel", "cat"]}, {"class_to_idx": {"eel": np.int64(0), "cat": np.int64(1)}}
    for attributes in named:
        assert set_up(FromDatasets(train, Named([0, 1], **attributes), num_clients=2)).y.tolist()[4:] == [2, 0]


def test_classes_with_several_names_are_joined_by_any_of_them():
    """As those of torchvision's ImageNet."""
    train = Named([0, 1], class_to_idx={"tench": 0, "Tinca tinca": 0, "eel": 1})
    test = Named([0, 1, 2], class_to_idx={"eel": 0, "Anguilla": 0, "Tinca tinca": 1, "fox": 2})
    data = set_up(FromDatasets(train, test, num_clients=1))
    assert data.y.tolist() == [0, 1, 1, 0, 2] and data.reader.data.class_numbers["Anguilla"] == 1


class Triples(Named):
    def __getitem__(self, index):
        return torch.ones(3), torch.ones(3), self.given[index]


def test_samples_whose_class_nobody_can_find_are_refused():
    train, test = (Triples([0, 1], targets=[0, 1], classes=names) for names in (["cat", "dog"], ["dog", "cat"]))
    with pytest.raises(InvalidArgumentError, match=r"test_dataset is 'Triples', but .* because .* 'dog' is 0, not 1"):
        FromDatasets(train, test, num_clients=2, collate_fn=lambda samples: [each[::2] for each in samples]).setup()


@pytest.mark.parametrize(
    ("sample", "keys"),
    [
        ({"x": 1.0, "label": 0}, "x, label"),
        ((torch.ones(3), 0), "they have none"),
        (torch.ones(3), "they have none"),
        (np.ones(3), "they have none"),
        (Image.new("L", (2, 2)), "they have none"),
    ],
)
def test_keys_that_samples_do_not_have_are_refused(sample, keys):
    with pytest.raises(InvalidArgumentError) as caught:
        FromDatasets([sample] * 4, [sample] * 4, targets="labels", num_clients=2).setup()
    allowed = f"an attribute of the dataset or a key of its samples ({keys})"
    assert (caught.value.argument, caught.value.allowed) == ("targets", allowed)
