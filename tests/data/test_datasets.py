"""Data sets read from small files of the real formats; nothing is downloaded."""

import hashlib
import pickle
from urllib.error import URLError

import numpy as np
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI
from PIL import Image
from torchvision import datasets
from torchvision.transforms.v2 import Resize, functional

from fedmoe_pl.data import (
    CIFAR10,
    CIFAR100,
    EMNIST,
    MNIST,
    SVHN,
    Digits,
    Dirichlet,
    FashionMNIST,
    FederatedDataModule,
    ImageFolder,
    NpzFile,
    RandomCrop,
    RandomHorizontalFlip,
)

rng = np.random.default_rng(0)
IDENTITY = {"mean": (0.0,), "std": (1.0,), "num_clients": 2}


def set_up(datamodule):
    datamodule.prepare_data()
    datamodule.setup()
    return datamodule


def pixels(*shape):
    return rng.integers(0, 256, shape, dtype=np.uint8)


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


def test_digits_are_split_by_class_and_scaled():
    data = set_up(Digits(num_clients=10))
    assert data.x.shape == (1797, 1, 8, 8) and data.num_classes == 10
    assert data.x.min() == 0 and data.x.max() == 1
    train, test = (torch.bincount(data.y[part]) for part in (data.train_samples.indices, data.global_test))
    assert torch.equal(test, (train + test) // 5)
    assert set_up(Digits(num_clients=10, image_size=32)).x.shape == (1797, 1, 32, 32)


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
def test_a_failed_download_is_one_sentence(kind, tmp_path, monkeypatch):
    def fail(self):
        raise URLError("no\nnetwork")

    monkeypatch.setattr(getattr(datasets, kind.__name__), "download", fail)
    with pytest.raises(MisconfigurationException, match="could not be downloaded") as error:
        kind(root=str(tmp_path)).prepare_data()
    message, name = str(error.value), kind.__name__
    assert message.startswith(f"{name}: root is '{tmp_path}', but {name} is not in '{tmp_path}' and could not be")
    assert "\n" not in message and "network" in message


def test_missing_and_damaged_files_are_one_sentence(tmp_path):
    data = MNIST(root=str(tmp_path), download=False, num_clients=2)
    data.prepare_data()
    with pytest.raises(MisconfigurationException, match=r"MNIST: root is .*, but MNIST is not in"):
        data.setup()
    write_mnist(tmp_path / "MNIST" / "raw")
    (tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte").write_bytes(b"\0\0\x08\x03damaged")
    with pytest.raises(MisconfigurationException, match=r"MNIST: root is .*, but MNIST is not in"):
        data.setup()
    with pytest.raises(MisconfigurationException, match=r"EMNIST: split is 'all', but must be one of byclass"):
        EMNIST(split="all")  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 3), (1, 4, 5), (3, 4, 5)])
def test_npz_images_of_every_layout_end_channels_first(shape, tmp_path):
    x = pixels(6, *shape)
    channels_last = x if shape[-1] in (1, 3) and len(shape) == 3 else None
    expected = x[:, None] if len(shape) == 2 else x if channels_last is None else x.transpose(0, 3, 1, 2)
    labels = np.arange(3, dtype=np.uint8)
    np.savez(tmp_path / "own.npz", x_train=x[:3], y_train=labels, x_test=x[3:], y_test=labels)
    channels = expected.shape[1]
    mean, std = (0.0,) * channels, (1.0,) * channels
    data = set_up(NpzFile(path=str(tmp_path / "own.npz"), mean=mean, std=std, num_clients=2))
    torch.testing.assert_close(data.x, torch.from_numpy(expected).float() / 255)
    small = set_up(NpzFile(path=str(tmp_path / "own.npz"), image_size=2, num_clients=2))
    assert small.x.shape == (6, channels, 2, 2)


def test_npz_floats_are_taken_as_they_are_with_their_clients(tmp_path):
    x = rng.normal(size=(5, 7))
    np.savez_compressed(
        tmp_path / "own.npz",
        x_train=x[:3],
        y_train=[0, 1, 1],
        x_test=x[3:],
        y_test=[0, 1],
        client_train=["b", "a", "b"],
        client_test=["a", "b"],
    )
    data = set_up(NpzFile(path=str(tmp_path / "own.npz")))
    assert torch.equal(data.x, torch.from_numpy(x).float())
    assert [part.tolist() for part in data.train_samples] == [[1], [0, 2]]
    assert [part.tolist() for part in data.test_samples] == [[3], [4]]


GOOD = {"x_train": pixels(3, 2, 2), "y_train": [0, 1, 0], "x_test": pixels(2, 2, 2), "y_test": [0, 1]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_test": None, "y_test": None}, r"the file lacks x_test, y_test; it must hold x_train, "),
        ({"y_train": [0, 1]}, r"y_train has shape \(2,\), but must hold one label for each of the 3 samples"),
        ({"y_train": [0.0, 1.0, 0.5]}, r"y_train is float64, but labels must be integers"),
        ({"y_test": [0, -1]}, r"y_test holds torch\.int64 numbers from -1"),
        ({"y_test": np.array(["a", {}], dtype=object)}, r"the file is damaged or no \.npz file of plain arrays"),
        (
            {"x_train": np.zeros((3, 2, 2), dtype=np.int32)},
            r"x_train is int32 of shape \(3, 2, 2\), but must be uint8 images",
        ),
        ({"x_train": pixels(3, 2, 2, 2)}, r"x_train has shape \(3, 2, 2, 2\), but images must have shape"),
        ({"client_train": [1, 2]}, r"client_train has shape \(2,\)"),
    ],
)
def test_bad_npz_files_are_refused_in_one_sentence(changes, message, tmp_path):
    path = tmp_path / "own.npz"
    np.savez(path, **{key: value for key, value in (GOOD | changes).items() if value is not None})
    with pytest.raises(MisconfigurationException, match=message) as error:
        NpzFile(path=str(path), num_clients=1).setup()
    assert str(error.value).startswith(f"NpzFile: path is '{path}'") and "\n" not in str(error.value)


def test_missing_and_damaged_npz_files_are_refused_in_one_sentence(tmp_path):
    path = tmp_path / "own.npz"
    with pytest.raises(MisconfigurationException, match=r"NpzFile: path is .*, but there is no such file"):
        NpzFile(path=str(path), num_clients=1).setup()
    np.savez_compressed(path, **GOOD)
    content = path.read_bytes()
    np.save(tmp_path / "one.npy", GOOD["x_train"])
    damaged = [b"", b"text", content[: len(content) // 2], (tmp_path / "one.npy").read_bytes()]
    for place in range(0, len(content), 7):
        damaged.append(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
    refused = 0
    for content in damaged:
        path.write_bytes(content)
        try:
            NpzFile(path=str(path), num_clients=1).setup()  # a byte of padding or of a date may go unnoticed
        except MisconfigurationException as error:
            refused += 1
            assert "\n" not in str(error)
    assert refused > len(damaged) / 2


def write_images(folder, sizes):
    for name, (height, width) in sizes.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels(height, width, 3)).save(folder / name)


def test_image_folders_are_read_and_test_classes_go_by_name(tmp_path):
    write_images(tmp_path / "train", {"cat/1.png": (6, 4), "dog/1.png": (6, 4), "eel/1.png": (6, 4)})
    write_images(tmp_path / "test", {"eel/2.png": (6, 4)})
    folders = {"train_dir": str(tmp_path / "train"), "test_dir": str(tmp_path / "test"), "num_clients": 3}
    data = set_up(ImageFolder(**folders, mean=(0.0,) * 3, std=(1.0,) * 3))
    assert data.y.tolist() == [0, 1, 2, 2]
    eel = torch.from_numpy(np.array(Image.open(tmp_path / "test" / "eel" / "2.png"))).permute(2, 0, 1)
    torch.testing.assert_close(data.x[3], eel.float() / 255)
    assert set_up(ImageFolder(**folders, image_size=3)).x.shape == (4, 3, 3, 3)


def test_bad_image_folders_are_refused_in_one_sentence(tmp_path):
    train, test = tmp_path / "train", tmp_path / "test"

    def refused(message, **kwargs):
        with pytest.raises(MisconfigurationException, match=message) as error:
            ImageFolder(train_dir=str(train), test_dir=str(test), num_clients=1, **kwargs).setup()
        assert "\n" not in str(error.value)

    refused(r"ImageFolder: train_dir is .*, but there is no such folder")
    train.mkdir()
    refused(r"ImageFolder: train_dir is .* one folder of images per class")
    write_images(train, {"cat/1.png": (6, 4), "cat/2.png": (5, 4)})
    write_images(test, {"cat/1.png": (6, 4)})
    refused(r"image_size is None, but must be set, .* 5 x 4 pixels .* 6 x 4")
    (train / "cat" / "2.png").write_bytes(b"no image")
    refused(r"ImageFolder: train_dir is .*2\.png' cannot be read as an image", image_size=4)
    write_images(test, {"dog/1.png": (6, 4)})
    refused(r"ImageFolder: test_dir is .* has the class 'dog'")


YAML = """
seed_everything: 0
model: lightning.pytorch.demos.boring_classes.BoringModel
data:
  class_path: CIFAR10
  init_args:
    root: somewhere
    image_size: 24
    mean: [0.5, 0.5, 0.5]
    std: [0.5, 0.5, 0.5]
    num_clients: 100
    partitioner: {class_path: Dirichlet, init_args: {alpha: 0.5}}
    augmentation:
      - {class_path: RandomCrop, init_args: {padding: 2}}
      - RandomHorizontalFlip
"""


# jsonargparse deprecates what lightning 2.6.6 uses
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_a_yaml_with_bare_class_names_becomes_a_data_module(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])  # LightningCLI warns of arguments besides `args`
    (tmp_path / "run.yaml").write_text(YAML)
    cli = LightningCLI(
        LightningModule,
        FederatedDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        run=False,
        args=["--config", str(tmp_path / "run.yaml")],
    )
    data = cli.datamodule
    assert isinstance(data, CIFAR10)
    assert (data.root, data.image_size, data.mean, data.requested_clients) == ("somewhere", 24, (0.5, 0.5, 0.5), 100)
    assert isinstance(data.partitioner, Dirichlet) and data.partitioner.alpha == 0.5
    crop, flip = data.augmentation
    assert isinstance(crop, RandomCrop) and isinstance(flip, RandomHorizontalFlip)
    assert (crop.padding, flip.p) == (2, 0.5)
    assert "padding: 2" in cli.parser.dump(cli.config)
