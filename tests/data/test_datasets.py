"""The data sets of the package, from small files that the tests write."""

import csv
import gzip
import hashlib
import json
import pickle
from urllib.error import URLError

import numpy as np
import pytest
import torch
from helpers.data import pixels, refused_argument, set_up
from PIL import Image
from torchvision import datasets
from torchvision.transforms.v2 import Resize, functional

from fedmoe_pl.data import CIFAR10, CIFAR100, EMNIST, FEMNIST, MNIST, SVHN, AGNews, Digits, FashionMNIST
from fedmoe_pl.data.datasets.ag_news import tokenize

IDENTITY = {"mean": (0.0,), "std": (1.0,), "num_clients": 2}


def write_idx(path, array):
    """The format of MNIST's files: two zeros, type, number of dimensions, sizes, bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    sizes = b"".join(size.to_bytes(4, "big") for size in array.shape)
    path.write_bytes(bytes([0, 0, 8, array.ndim]) + sizes + array.tobytes())


def write_mnist(folder, prefix="", train="train", test="t10k", labels=(0, 1, 2)):
    x = {train: pixels(3, 28, 28), test: pixels(3, 28, 28)}
    for part, images in x.items():
        write_idx(folder / f"{prefix}{part}-images-idx3-ubyte", images)
        write_idx(folder / f"{prefix}{part}-labels-idx1-ubyte", np.array(labels, dtype=np.uint8))
    return np.concatenate([x[train], x[test]])


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST])
def test_mnist_files_are_read_and_normalized_with_the_constants_of_mnist(kind, tmp_path):
    x = write_mnist(tmp_path / kind.__name__ / "raw")
    data = set_up(kind(root=str(tmp_path), num_clients=2))
    expected = (torch.from_numpy(x)[:, None].float() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(data.x, expected)
    assert data.y.tolist() == [0, 1, 2, 0, 1, 2]


def test_resizing_is_that_of_torchvision_on_pil_images(tmp_path):
    x = write_mnist(tmp_path / "MNIST" / "raw")
    data = set_up(MNIST(root=str(tmp_path), image_size=32, **IDENTITY))
    for image, resized in zip(x, data.x, strict=True):
        expected = functional.pil_to_tensor(Resize(32)(Image.fromarray(image)))
        assert (resized * 255 - expected).abs().max() < 1.01  # in uint8 they round differently, by one at most


@pytest.mark.parametrize(("split", "labels"), [("balanced", (0, 1, 46)), ("letters", (1, 2, 26))])
def test_emnist_is_upright_and_its_classes_count_from_0(split, labels, tmp_path):
    x = write_mnist(tmp_path / "EMNIST" / "raw", f"emnist-{split}-", "train", "test", labels)
    data = set_up(EMNIST(split=split, root=str(tmp_path), **IDENTITY))
    torch.testing.assert_close(data.x[:, 0], torch.from_numpy(x).float().transpose(1, 2) / 255)
    assert data.num_classes == {"balanced": 47, "letters": 26}[split]
    assert data.y.min() == 0


@pytest.mark.parametrize(("kind", "key"), [(CIFAR10, "labels"), (CIFAR100, "fine_labels")])
def test_cifar_files_are_read_channels_first(kind, key, tmp_path, monkeypatch):
    official = getattr(datasets, kind.__name__)
    folder = tmp_path / official.base_folder
    folder.mkdir()
    x = []
    for files in ("train_list", "test_list"):
        written = []
        for name, _ in getattr(official, files):
            x.append(pixels(2, 3, 32, 32))
            content = pickle.dumps({"data": x[-1].reshape(2, -1), key: [0, 1]})
            (folder / name).write_bytes(content)
            written.append((name, hashlib.md5(content).hexdigest()))
        monkeypatch.setattr(official, files, written)
    content = pickle.dumps({official.meta["key"]: ["cat", "dog"]})
    (folder / official.meta["filename"]).write_bytes(content)
    monkeypatch.setattr(official, "meta", official.meta | {"md5": hashlib.md5(content).hexdigest()})
    data = set_up(kind(root=str(tmp_path), mean=(0.0,) * 3, std=(1.0,) * 3, num_clients=2))
    torch.testing.assert_close(data.x, torch.from_numpy(np.concatenate(x)).float() / 255)
    assert data.num_classes == 2


def test_svhn_files_are_read_and_label_10_is_digit_0(tmp_path, monkeypatch):
    scipy_io = pytest.importorskip("scipy.io")
    x = {part: pixels(32, 32, 3, 2) for part in ("train", "test")}
    splits = {}
    for part, images in x.items():
        scipy_io.savemat(tmp_path / f"{part}.mat", {"X": images, "y": np.array([[10], [3]], dtype=np.uint8)})
        splits[part] = ["", f"{part}.mat", hashlib.md5((tmp_path / f"{part}.mat").read_bytes()).hexdigest()]
    monkeypatch.setattr(datasets.SVHN, "split_list", splits)
    data = set_up(SVHN(root=str(tmp_path), mean=(0.0,) * 3, std=(1.0,) * 3, num_clients=2))
    expected = np.concatenate([x["train"], x["test"]], axis=3).transpose(3, 2, 0, 1)
    torch.testing.assert_close(data.x, torch.from_numpy(expected).float() / 255)
    assert data.y.tolist() == [0, 3, 0, 3]


@pytest.mark.parametrize("kind", [MNIST, FashionMNIST, EMNIST, CIFAR10, CIFAR100, SVHN])
def test_missing_files_and_a_failed_download_are_refused(kind, tmp_path, monkeypatch):
    def fail(self):
        raise URLError("no\nnetwork")

    monkeypatch.setattr(getattr(datasets, kind.__name__), "download", fail)
    assert refused_argument(lambda: kind(root=str(tmp_path)).prepare_data()) == "root"
    assert refused_argument(lambda: kind(root=str(tmp_path), download=False, num_clients=2)) == "root"


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
    train, test = (
        [[(data.x[i, 0, 0, 0].item(), data.y[i].item()) for i in part] for part in parts]
        for parts in (data.train_samples, data.test_samples)
    )
    assert train == [[(0.125, 0)], [(0.75, 10)], [(0.25, 61), (0.5, 3)]]  # in the order of the writers' names
    assert test == [[(0.375, 5)], [(1.0, 10)], [(0.0, 3)]]
    assert (data.x[:, 0, 27, 27] == 1).all()  # rows of pixels end where LEAF's do


def test_without_a_test_folder_each_writer_holds_out_a_share(tmp_path):
    write_leaf(tmp_path / "train", b=[(i / 8, 1) for i in range(5)], a=[(i / 16, 0) for i in range(10)])
    data = set_up(FEMNIST(root=str(tmp_path), pool=True, test_fraction=0.2))
    assert data.train_samples.sizes.tolist() == [8, 4] and data.test_samples.sizes.tolist() == [2, 1]
    assert data.y[data.global_test].tolist() in ([0, 0, 1], [1, 0, 0])


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


def write_csv(path, rows, opened=open):
    with opened(path, "wt", encoding="utf-8-sig", newline="") as file:  # as Excel writes it
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


def test_digits_are_split_by_class_and_scaled():
    data = set_up(Digits(num_clients=10))
    assert data.x.shape == (1797, 1, 8, 8) and data.num_classes == 10
    assert data.x.min() == 0 and data.x.max() == 1
    train, test = (torch.bincount(data.y[part]) for part in (data.train_samples.indices, data.global_test))
    assert torch.equal(test, (train + test) // 5)
    assert set_up(Digits(num_clients=10, image_size=32)).x.shape == (1797, 1, 32, 32)
