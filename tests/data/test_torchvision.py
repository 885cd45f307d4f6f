"""Torchvision's data sets, from small files that the tests write."""

import hashlib
import pickle
from urllib.error import URLError

import numpy as np
import pytest
import torch
from helpers.data import pixels, refused_argument, set_up
from PIL import Image
from torchvision import datasets
from torchvision.transforms.v2 import Resize, functional

from fedmoe_pl.data import CIFAR10, CIFAR100, EMNIST, MNIST, SVHN, FashionMNIST

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
