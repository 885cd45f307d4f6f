"""Texts as ids of words, and LEAF's handwriting by writer, from small files that the tests write."""

import csv
import gzip
import json

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI

from fedmoe_pl.data import FEMNIST, AGNews, Arrays, FederatedDataModule, NpzFile, RandomCrop
from fedmoe_pl.data.datasets.ag_news import to_ids, tokenize, vocabulary


def set_up(datamodule):
    datamodule.prepare_data()
    datamodule.setup()
    return datamodule


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("You can now install TorchText using pip!", "you can now install torchtext using pip !"),  # torchtext's own
        ("Fed's  \tmove (again), at U.S. rates?", "fed ' s move ( again ) , at u . s . rates ?"),
        ('He said: "No"; then left...', "he said no then left . . ."),
        ("AP - 3.5% #39;s a-b &lt;b&gt;", "ap - 3 . 5% #39 s a-b &lt b&gt"),
        ("", ""),
        (" ;:", ""),
    ],
)
def test_texts_are_split_into_words_like_basic_english(text, words):
    assert tokenize(text) == words.split()


def test_the_vocabulary_is_what_is_most_frequent_and_equally_frequent_words_go_by_alphabet():
    texts = [tokenize(text) for text in ("b a b", "c a b", "d c")]
    assert vocabulary(texts, 10) == {"b": 2, "a": 3, "c": 4, "d": 5}
    assert vocabulary(texts, 2) == {"b": 2, "a": 3}
    assert to_ids(texts, vocabulary(texts, 2), 2).tolist() == [[2, 3], [1, 3], [1, 1]]
    assert to_ids(texts, vocabulary(texts, 3), 4).tolist() == [[2, 3, 2, 0], [4, 3, 2, 0], [1, 4, 0, 0]]


def write_csv(path, rows, opened=open):
    with opened(path, "wt", encoding="utf-8", newline="") as file:
        csv.writer(file, quoting=csv.QUOTE_ALL).writerows(rows)


TRAIN = [(3, "Oil up", "Oil, again"), (1, "Talks", "oil talks"), (4, "Ünder", "the sea")]
TEST = [(2, "Oil", 'the "goal"')]


@pytest.mark.parametrize("compressed", [False, True])
def test_ag_news_files_become_ids_of_the_most_frequent_training_words(compressed, tmp_path):
    for part, rows in (("train", TRAIN), ("test", TEST)):
        name = f"{part}.csv.gz" if compressed else f"{part}.csv"
        write_csv(tmp_path / name, rows, gzip.open if compressed else open)
    data = set_up(AGNews(root=str(tmp_path), vocabulary_size=3, length=4, num_clients=2))
    # oil 3 times, talks 2 times, and of the words that are there once "," comes first
    assert data.x.tolist() == [[2, 1, 2, 4], [3, 2, 3, 0], [1, 1, 1, 0], [2, 1, 1, 0]]
    assert data.x.dtype == torch.int64 and data.y.tolist() == [2, 0, 3, 1]
    assert data.global_test.tolist() == [3] and data.num_classes == 4


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (None, r"has neither train\.csv nor train\.csv\.gz"),
        ([(5, "a", "b")], r"row 1 of '.*train\.csv' has 3 columns and begins with '5'; it must have three"),
        ([*TRAIN, (1, "a")], r"row 4 of '.*train\.csv' has 2 columns"),
        ([("label", "title", "description")], r"begins with 'label'"),
        ([()], r"row 1 of .* has 0 columns and begins with ''"),
        ([], r"x_train holds no samples"),
    ],
)
def test_bad_ag_news_files_are_refused_in_one_sentence(rows, message, tmp_path):
    write_csv(tmp_path / "test.csv", TEST)
    if rows is not None:
        write_csv(tmp_path / "train.csv", rows)
    with pytest.raises(MisconfigurationException, match=message) as error:
        AGNews(root=str(tmp_path), num_clients=1).setup()
    assert str(error.value).endswith(".") and "\n" not in str(error.value)
    assert str(error.value).startswith(f"AGNews: root is '{tmp_path}', but") or rows == []


def test_damaged_files_and_bad_arguments_of_ag_news_are_refused(tmp_path):
    (tmp_path / "train.csv.gz").write_bytes(b"no gzip")
    with pytest.raises(MisconfigurationException, match=r"train\.csv\.gz' cannot be read as a CSV file"):
        AGNews(root=str(tmp_path), num_clients=1).setup()
    (tmp_path / "train.csv").write_bytes(b"\xff\xfe")
    with pytest.raises(MisconfigurationException, match=r"train\.csv' cannot be read as a CSV file"):
        AGNews(root=str(tmp_path), num_clients=1).setup()
    for name in ("vocabulary_size", "length"):
        with pytest.raises(MisconfigurationException, match=rf"AGNews: {name} is 0, "):
            AGNews(**{name: 0})


class Own(FederatedDataModule):
    """Arrays that are at hand."""

    def __init__(self, arrays: Arrays, **kwargs):
        super().__init__(**kwargs)
        self.arrays = arrays

    def load(self) -> Arrays:
        return self.arrays


def test_ids_of_words_are_taken_as_they_are_into_batches():
    x = torch.tensor([[5, 2**40], [7, 0], [1, 1]])  # float32 would not hold the large one + 1
    x[0, 1] += 1
    y = torch.tensor([0, 1, 0])
    data = set_up(Own(Arrays(x, y, x[:1], y[:1]), num_clients=1))
    assert torch.equal(data.x, torch.cat((x, x[:1]))) and data.x.dtype == torch.int64
    assert data.black.tolist() == [[[0.0]]]
    ((batch, labels),) = data.batches(data.train_samples[0])
    order = data.train_samples[0]
    assert torch.equal(batch, x[order]) and torch.equal(labels, y[order])


@pytest.mark.parametrize("dtype", [np.int16, np.int64, np.uint32])
def test_integer_arrays_of_an_npz_file_are_ids_of_words(dtype, tmp_path):
    x, y = np.arange(40, dtype=dtype).reshape(10, 4) * 100, np.arange(10) % 2
    np.savez(tmp_path / "own.npz", x_train=x[:8], y_train=y[:8], x_test=x[8:], y_test=y[8:])
    data = set_up(NpzFile(path=str(tmp_path / "own.npz"), num_clients=2))
    assert data.x.dtype == torch.int64 and data.x.tolist() == x.tolist()


WORDS, LABELS = torch.ones(4, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)


@pytest.mark.parametrize(
    ("x", "kwargs", "message"),
    [
        (WORDS, {"augmentation": [RandomCrop()]}, r"augmentation must be left out for samples of shape"),
        (WORDS, {"rotations": [0, 180]}, r"rotations is \[0, 180\], but samples of shape \(3,\)"),
        (-WORDS, {}, r"x_train holds the id -1, but ids of words must be integers from 0"),
        (WORDS.int(), {}, r"x_train is torch\.int32 of shape \(4, 3\), but must be"),
        (WORDS[:, None], {}, r"x_train is torch\.int64 of shape \(4, 1, 3\), but must be"),
    ],
)
def test_what_does_not_go_with_words_is_refused_in_one_sentence(x, kwargs, message):
    with pytest.raises(MisconfigurationException, match=message) as error:
        Own(Arrays(x, LABELS, x, LABELS), num_clients=2, **kwargs).setup()
    assert str(error.value).endswith(".") and "\n" not in str(error.value)


def test_words_have_neither_a_mean_nor_a_size(tmp_path):
    path = str(tmp_path / "own.npz")
    np.savez(path, x_train=WORDS, y_train=LABELS, x_test=WORDS, y_test=LABELS)
    with pytest.raises(
        MisconfigurationException, match=r"mean is \[0\.5\], but must be None for torch\.int64 samples; only uint8"
    ):
        NpzFile(path=path, num_clients=1, mean=(0.5,), std=(0.5,)).setup()
    with pytest.raises(MisconfigurationException, match=r"image_size is 4, but samples of shape \(4, 3\) cannot be"):
        NpzFile(path=path, num_clients=1, image_size=4).setup()


def write_leaf(folder, **writers):
    """One of LEAF's files: of each writer the value of its images' pixels and their class."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {
        "users": list(writers),
        "num_samples": [len(samples) for samples in writers.values()],
        "user_data": {
            writer: {"x": [[value] * 783 + [1.0] for value, _ in samples], "y": [label for _, label in samples]}
            for writer, samples in writers.items()
        },
    }
    (folder / f"all_data_{len(list(folder.iterdir()))}_niid.json").write_text(json.dumps(content))


def test_leaf_files_give_each_writer_its_images(tmp_path):
    write_leaf(tmp_path / "train", f0002_01=[(0.25, 61), (0.5, 3)], f0001_02=[(0.75, 10)])
    write_leaf(tmp_path / "train", f0000_03=[(0.125, 0)])
    write_leaf(tmp_path / "test", f0002_01=[(0.0, 3)], f0001_02=[(1.0, 10)], f0000_03=[(0.375, 5)])
    data = set_up(FEMNIST(root=str(tmp_path)))
    assert data.num_clients == 3 and data.num_classes == 62 and data.x.shape == (7, 1, 28, 28)
    held = [[(data.x[i, 0, 0, 0].item(), data.y[i].item()) for i in part] for part in data.train_samples]
    assert held == [[(0.125, 0)], [(0.75, 10)], [(0.25, 61), (0.5, 3)]]  # in the order of the writers' names
    held = [[(data.x[i, 0, 0, 0].item(), data.y[i].item()) for i in part] for part in data.test_samples]
    assert held == [[(0.375, 5)], [(1.0, 10)], [(0.0, 3)]]
    assert (data.x[:, 0, 27, 27] == 1).all()  # rows of pixels end where LEAF's do


def test_without_a_test_folder_each_writer_holds_out_a_share(tmp_path):
    write_leaf(tmp_path / "train", b=[(i / 8, 1) for i in range(5)], a=[(i / 16, 0) for i in range(10)])
    data = set_up(FEMNIST(root=str(tmp_path), pool=True, test_fraction=0.2))
    assert data.train_samples.sizes.tolist() == [8, 4] and data.test_samples.sizes.tolist() == [2, 1]
    assert data.y[data.global_test].tolist() in ([0, 0, 1], [1, 0, 0])


def test_bad_leaf_folders_are_refused_in_one_sentence(tmp_path):
    def refused(message, **kwargs):
        with pytest.raises(MisconfigurationException, match=message) as error:
            FEMNIST(root=str(tmp_path), **kwargs).setup()
        assert str(error.value).startswith(f"FEMNIST: root is '{tmp_path}', ")
        assert str(error.value).endswith(".") and "\n" not in str(error.value)

    refused(r"has no folder test; set pool to true and")
    refused(r"train' has no \.json files of LEAF", pool=True, test_fraction=0.5)
    write_leaf(tmp_path / "train", a=[(0.5, 1)])
    (tmp_path / "test").mkdir()
    refused(r"test' has no \.json files of LEAF")
    for content, message in (
        ("{", "is not a file of FEMNIST as LEAF writes it"),
        ("[]", "is not a file of FEMNIST as LEAF writes it"),
        ('{"users": ["a"]}', r"\(no 'user_data'\)"),
        (
            '{"users": ["a"], "user_data": {"a": {"x": [[0, 1]], "y": [1]}}}',
            "is not a file of FEMNIST as LEAF writes it",
        ),
        (json.dumps({"users": ["a"], "user_data": {"a": {"x": [[0] * 784], "y": []}}}), "1 images and 0 labels"),
    ):
        (tmp_path / "test" / "bad.json").write_text(content)
        refused(message)


YAML = """
seed_everything: 0
model: lightning.pytorch.demos.boring_classes.BoringModel
data:
  class_path: {name}
  init_args:
    root: somewhere
    num_clients: 20
    stratify: true
    pool: true
    test_fraction: 0.2
    global_test_size: 1000
    partitioner: {partitioner}
"""


@pytest.mark.parametrize(
    ("name", "partitioner"),
    [
        ("AGNews", "{class_path: MajorityClasses, init_args: {majority_share: 0.5, pairs: product}}"),
        ("FEMNIST", "{class_path: ClientDirichlet, init_args: {alpha: 0.5, samples_per_client: 500}}"),
        ("CIFAR10", "{class_path: TwoClasses, init_args: {balance: 0.75}}"),
        ("SVHN", "Shards"),
        ("CIFAR100", "{class_path: Pathological, init_args: {classes_per_client: 10, share: dirichlet}}"),
        ("CIFAR10", "{class_path: BalancedDirichlet, init_args: {alpha: 0.5}}"),
        ("CIFAR10", "null\n    rotations: [0, 180]"),
    ],
)
def test_the_papers_data_can_be_written_in_yaml(name, partitioner, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])  # LightningCLI warns of arguments besides `args`
    (tmp_path / "run.yaml").write_text(YAML.format(name=name, partitioner=partitioner))
    made = LightningCLI(
        LightningModule,
        FederatedDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        args=["--config", str(tmp_path / "run.yaml")],
    ).datamodule
    assert type(made).__name__ == name and (made.stratify, made.pool, made.global_test_size) == (True, True, 1000)
    assert made.partitioner is None or type(made.partitioner).__name__ in partitioner
    assert made.rotations == ([0, 180] if made.partitioner is None else None)
