"""What would give wrong data is refused by its argument, in one line: arguments, arrays, files and data sets."""

import gzip
import json
import zipfile

import numpy as np
import pytest
import torch
from helpers.data import Own, numbered, pixels, random_images, refused_argument, vectors
from helpers.map_style import DictData, Dicts, Noisy, padded
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler

from fedmoe_pl.data import (
    FEMNIST,
    IID,
    AGNews,
    Arrays,
    BalancedDirichlet,
    Batches,
    ClientDirichlet,
    Digits,
    Dirichlet,
    FromDataModule,
    FromDatasets,
    ImageFolder,
    MajorityClasses,
    NaturalIds,
    NpzFile,
    Pathological,
    PredefinedIndices,
    RandomCrop,
    RandomHorizontalFlip,
    Shards,
    TwoClasses,
)

NAN = float("nan")
TEN = np.arange(100) % 10


def of_ten(partitioner, num_clients, labels=TEN):
    return lambda: partitioner(labels, num_clients, np.random.default_rng(0))


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("alpha", lambda: Dirichlet(0)),
        ("alpha", lambda: ClientDirichlet(NAN, 5)),
        ("alpha", lambda: BalancedDirichlet(float("inf"))),
        ("samples_per_client", lambda: ClientDirichlet(1, 0)),
        ("samples_per_client", of_ten(ClientDirichlet(1, 21), 5)),
        ("minimum_samples", of_ten(BalancedDirichlet(1, 21), 5)),
        ("minimum_samples", of_ten(BalancedDirichlet(1e-3, 1), 5, TEN % 1)),
        ("majority_share", lambda: MajorityClasses(0)),
        ("majority_share", lambda: MajorityClasses(1.1)),
        ("majority_share", of_ten(MajorityClasses(0.5, 1), 3, TEN % 2)),
        ("majority_share", of_ten(MajorityClasses(1.0, 1, "product"), 1, TEN % 1)),
        ("pairs", lambda: MajorityClasses(0.5, pairs="all")),  # pyright: ignore[reportArgumentType]
        ("num_clients", of_ten(MajorityClasses(0.5, 1, "product"), 10, TEN % 3)),
        # both clients want the one sample of class 0
        ("samples_per_client", of_ten(MajorityClasses(1.0, None, "product"), 2, np.array([0, 1, 1, 1]))),
        ("balance", lambda: TwoClasses(500, 1.0)),
        ("balance", lambda: TwoClasses(4, 0.01)),
        ("shards_per_client", of_ten(Shards(3), 50)),
        ("concentration", lambda: Pathological(concentration=2.0)),
        ("concentration", lambda: Pathological(share="dirichlet", concentration=0)),
        ("padding", lambda: RandomCrop(0)),
        ("p", lambda: RandomHorizontalFlip(1.5)),
        ("batch_size", lambda: Batches(torch.ones(1), torch.ones(1), torch.arange(1), 0)),
        ("num_clients", lambda: Digits(num_clients=2.5)),  # pyright: ignore[reportArgumentType]
        ("batch_size", lambda: Digits(batch_size=True)),
        ("image_size", lambda: Digits(num_clients=2, image_size=10**9)),  # no machine has this memory
        ("partition_seed", lambda: Digits(partition_seed=-1)),
        ("test_fraction", lambda: Digits(test_fraction=NAN)),
        ("validation_fraction", lambda: Digits(test_fraction=0.5, validation_fraction=0.5)),
        ("global_test_size", lambda: Digits(num_clients=2, global_test_size=10**9)),
        ("rotations", lambda: Digits(rotations=[])),
        ("rotations", lambda: Digits(rotations=[0, 45])),
        ("rotations", lambda: Digits(rotations=[0, 0])),
        ("partitioner", lambda: Digits(rotations=[0], partitioner=IID())),
    ],
)
def test_an_argument_is_refused(argument, make):
    assert refused_argument(make) == argument


def test_a_client_with_fewer_classes_in_the_data_than_it_needs_is_refused():
    for partitioner in (TwoClasses(2), Pathological(2)):
        with pytest.raises(MisconfigurationException, match="2 different classes, but the data have 1"):
            of_ten(partitioner, 2, TEN % 1)()


IDS = np.array([*"aab"])


@pytest.mark.parametrize(
    ("argument", "arrays", "kwargs"),
    [
        ("num_clients", vectors(6), {}),
        ("num_clients", vectors(6), {"num_clients": 7}),
        ("num_clients", vectors(6), {"num_clients": 5, "partitioner": Dirichlet(1e-3)}),
        ("num_clients", vectors(3, client_train=IDS), {"num_clients": 3}),
        ("partitioner", vectors(6), {"partitioner": NaturalIds()}),
        ("test_fraction", vectors(3, client_train=IDS, client_test=np.array([*"aabb"])), {"test_fraction": 0.1}),
        ("test_fraction", random_images(), {"num_clients": 2, "rotations": [0], "test_fraction": 0.5}),
        ("test_fraction", numbered([0, 1]), {"num_clients": 2, "pool": True}),
        ("pool", numbered([0, 1, 2], [0], client_train=IDS), {"pool": True, "test_fraction": 0.5}),
        ("global_test_size", numbered([0, 1, 2], [0, 0, 0, 1, 1, 2]), {"num_clients": 1, "global_test_size": 6}),
        ("num_clients", random_images(), {"rotations": [0, 180]}),
        ("num_clients", random_images(), {"num_clients": 26, "rotations": [0, 180]}),
        ("rotations", numbered([0, 1]), {"num_clients": 2, "rotations": [0, 180]}),
        ("rotations", numbered([0, 1, 2], client_train=IDS), {"num_clients": 2, "rotations": [0]}),
    ],
)
def test_data_that_cannot_be_dealt_as_the_arguments_ask_are_refused(argument, arrays, kwargs):
    data = Own(arrays, **kwargs)
    for _ in range(2):  # a second attempt does not find a half-made data module
        assert refused_argument(lambda: data) == argument


def of_images(**kwargs):
    images = torch.zeros(4, 3, 2, 2, dtype=torch.uint8)
    return Arrays(images, torch.arange(4), images, torch.arange(4), **kwargs)


@pytest.mark.parametrize(
    ("argument", "arrays"),
    [
        ("std", of_images(mean=[0.0] * 3)),
        ("mean", of_images(std=[1.0] * 3)),
        ("std", of_images(mean=[0.0] * 3, std=[1.0])),
        ("std", of_images(mean=[0.0] * 3, std=[1.0, 0.0, 1.0])),
        ("mean", of_images(mean=[0.0, NAN, 0.0], std=[1.0] * 3)),
        ("mean", vectors(6, mean=[0.5], std=[0.5])),
    ],
)
def test_a_wrong_normalization_is_refused(argument, arrays):
    assert refused_argument(lambda: Own(arrays, num_clients=1)) == argument


GOOD = {"x_train": np.ones((4, 5)), "y_train": [0, 1, 0, 1], "x_test": np.ones((2, 5)), "y_test": [0, 1]}
ARRAYS = {  # what is wrong in an .npz file, and the argument
    "a label of 10**9": ({"y_train": [0, 1, 0, 10**9]}, "y_train"),
    "a label of 2**64 - 1": ({"y_test": np.array([0, 2**64 - 1], np.uint64)}, "y_test"),
    "a label of 1.7": ({"y_train": [0, 1, 0, 1.7]}, "y_test"),
    "a label that is nan": ({"y_train": [0, 1, 0, NAN]}, "y_train"),
    "a negative label": ({"y_train": [0, 1, 0, -1]}, "y_train"),
    "words as labels": ({"y_train": ["cat", "dog", "cat", "dog"]}, "y_train"),
    "too few labels": ({"y_train": [0, 1]}, "y_train"),
    "a label": ({"y_train": np.int64(3)}, "y_train"),
    "labels in a column": ({"y_train": [[0], [1], [0], [1]]}, "y_test"),
    "objects": ({"y_train": np.array([0, {}, 0, 1], object)}, "path"),
    "no samples": ({"x_train": np.ones((0, 5)), "y_train": np.zeros(0, int)}, "x_train"),
    "no test samples": ({"x_test": np.ones((0, 5)), "y_test": np.zeros(0, int)}, "x_test"),
    "one number": ({"x_train": np.float64(1.0)}, "x_train"),
    "infinity in a sample": ({"x_test": np.full((2, 5), np.inf)}, "x_test"),
    "too large for float32": ({"x_test": np.full((2, 5), 1e300)}, "x_test"),
    "complex numbers": ({"x_train": np.ones((4, 5), complex)}, "x_train"),
    "integers that are no words": ({"x_train": np.ones((4, 2, 2), int)}, "x_train"),
    "two channels": ({"x_train": pixels(4, 2, 2, 2)}, "x_train"),
    "another width": ({"x_test": np.ones((2, 6))}, "x_test"),
    "another type": ({"x_test": np.ones((2, 5), int)}, "x_test"),
    "a missing array": ({"y_test": None}, "path"),
    "a client that is nan": ({"client_train": [0, 1, NAN, NAN]}, "client_train"),
    "too few ids": ({"client_train": [0, 1]}, "client_train"),
    "ids in a column": ({"client_train": [[0], [1], [0], [1]]}, "client_train"),
}


@pytest.mark.parametrize("fault", ARRAYS)
def test_a_fault_in_arrays_is_refused(fault, tmp_path):
    changes, argument = ARRAYS[fault]
    path = tmp_path / "own.npz"
    np.savez(path, **{name: array for name, array in (GOOD | changes).items() if array is not None})
    assert refused_argument(lambda: NpzFile(str(path), num_clients=2)) == argument


def test_words_have_neither_a_mean_nor_a_size(tmp_path):
    path, words, labels = str(tmp_path / "own.npz"), np.ones((4, 3), np.int64), np.zeros(4, np.int64)
    np.savez(path, x_train=words, y_train=labels, x_test=words, y_test=labels)
    for arguments, argument in (({"mean": (0.5,), "std": (0.5,)}, "mean"), ({"image_size": 4}, "image_size")):
        assert refused_argument(lambda arguments=arguments: NpzFile(path, num_clients=1, **arguments)) == argument


def test_a_file_that_is_no_archive_or_damaged_is_refused(tmp_path):
    path = tmp_path / "own.npz"
    assert refused_argument(lambda: NpzFile(str(path), num_clients=2)) == "path"
    assert refused_argument(lambda: NpzFile("\0", num_clients=2)) == "path"
    np.savez_compressed(path, **GOOD)
    content = path.read_bytes()
    np.save(tmp_path / "one.npy", GOOD["x_train"])
    with zipfile.ZipFile(tmp_path / "text.zip", "w") as archive:
        archive.writestr("x_train", "no array")
    others = [(tmp_path / name).read_bytes() for name in ("one.npy", "text.zip")]
    for wrong in (b"", b"x_train: 1", content[: len(content) // 2], *others):
        path.write_bytes(wrong)
        assert refused_argument(lambda: NpzFile(str(path), num_clients=2)) == "path"
    places, refused = range(0, len(content), 7), 0
    for place in places:
        path.write_bytes(content[:place] + bytes([content[place] ^ 255]) + content[place + 1 :])
        try:
            NpzFile(path=str(path), num_clients=1).setup()  # a byte of padding or of a date may go unnoticed
        except MisconfigurationException:
            refused += 1
    assert refused > len(places) / 2


def of_noise(**arguments):
    return lambda: FromDatasets(Noisy(4), Noisy(4), **{"num_clients": 2, **arguments})


def of_dicts(**arguments):
    return lambda: FromDatasets(Dicts(4), Dicts(4), collate_fn=padded, num_clients=2, **arguments)


def of_indices(lists):
    return of_noise(num_clients=None, partitioner=PredefinedIndices(lambda labels: lists))


class Stream(IterableDataset):
    def __iter__(self):
        yield from ()


def of_loader(make, name="train_dataloader"):
    module = DictData()
    setattr(module, name, lambda: make(module.training))
    return lambda: FromDataModule(module, num_clients=2)


class OnDevice(DictData):
    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch


class NeedsTrainer(DictData):
    def setup(self, stage):
        assert self.trainer is not None, "no trainer"


@pytest.mark.parametrize(
    ("argument", "make"),
    [
        ("train_dataset", lambda: FromDatasets(Stream(), Noisy(3), num_clients=2)),
        ("train_dataset", lambda: FromDatasets(Noisy(0), Noisy(3), num_clients=2)),
        ("test_dataset", lambda: FromDatasets(Noisy(3), num_clients=2)),
        ("eval_dataset", of_noise(eval_dataset=Noisy(5))),
        ("targets", of_noise(targets="classes")),
        ("targets", of_noise(targets=lambda dataset: [0])),
        ("targets", of_noise(targets=lambda dataset: [0.5] * 4)),
        ("targets", of_noise(targets=lambda dataset: [1] * 4)),  # the batches have others
        ("targets", of_noise(targets=lambda dataset: [-1, 0, 1, 2])),
        ("groups", of_noise(groups="site")),
        ("augmentation", of_noise(augmentation=[RandomCrop()])),
        ("rotations", of_noise(rotations=[0, 180])),
        ("partitioner", of_dicts(partitioner=Dirichlet(0.5))),
        ("stratify", of_dicts(stratify=True, test_fraction=0.5)),
        ("global_test_size", of_dicts(global_test_size=9)),
        ("num_workers", of_noise(num_workers=-1)),
        ("indices", of_indices([[0, 1], [1]])),
        ("indices", of_indices([[0, 12]])),
        ("indices", of_indices([[0], []])),
        ("indices", of_indices(["0 1"])),
        ("indices", of_indices([])),
        ("indices", of_noise(partitioner=PredefinedIndices("missing.json"))),
        ("num_clients", of_noise(num_clients=5, partitioner=PredefinedIndices(lambda labels: [[0], [1]]))),
        ("datamodule", lambda: FromDataModule(Digits(), num_clients=2)),
        ("datamodule", lambda: FromDataModule(OnDevice(), num_clients=2)),
        ("datamodule", lambda: FromDataModule(NeedsTrainer(), num_clients=2)),
        ("datamodule", of_loader(lambda data: DataLoader(data, sampler=WeightedRandomSampler([1.0] * 22, 22)))),
        ("datamodule", of_loader(lambda data: DataLoader(data, batch_size=None))),
        ("datamodule", of_loader(lambda data: [DataLoader(data), DataLoader(data)])),
        ("train_dataset", of_loader(lambda data: DataLoader(Stream()))),
        ("test_dataset", of_loader(lambda data: DataLoader(Stream()), "test_dataloader")),
    ],
)
def test_datasets_that_cannot_be_dealt_are_refused(argument, make):
    assert refused_argument(make) == argument


WRITER = {"x": [[0.5] * 784], "y": [1]}


def leaf(**changes) -> str:
    return json.dumps({"users": ["a"], "user_data": {"a": {**WRITER, **changes}}})


def write_writers(folder, content=None):
    for part in ("train", "test"):
        (folder / part).mkdir()
        (folder / part / "all.json").write_text(leaf())
    if content is not None:
        (folder / "train" / "all.json").write_text(content)


@pytest.mark.parametrize("content", ["{", "", "3", "[]", "null", "{}", '{"users": []}', '{"users": null}'])
def test_a_file_that_is_not_leaf_s_is_refused(content, tmp_path):
    write_writers(tmp_path, content)
    assert refused_argument(lambda: FEMNIST(str(tmp_path))) == "root"


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        *(({"y": wrong}, "root") for wrong in ([1.7], ["1"], [None], [NAN], 1, [10**30], [1, 2])),
        *(({"y": wrong}, "y_train") for wrong in ([-1], [10**9])),
        *(({"x": wrong}, "root") for wrong in ([[0.5] * 783], [["w"] * 784])),
        *(({"x": wrong}, "x_train") for wrong in ([[None] * 784], [[NAN] * 784])),
    ],
)
def test_a_fault_of_a_writer_is_refused(changes, argument, tmp_path):
    write_writers(tmp_path, leaf(**changes))
    assert refused_argument(lambda: FEMNIST(str(tmp_path))) == argument


def test_folders_of_leaf_that_lack_files_or_have_a_writer_twice_are_refused(tmp_path):
    assert refused_argument(lambda: FEMNIST(str(tmp_path))) == "pool"
    assert refused_argument(lambda: FEMNIST(str(tmp_path), pool=True, test_fraction=0.5)) == "root"
    write_writers(tmp_path)
    (tmp_path / "train" / "1.json").write_text(leaf())
    assert refused_argument(lambda: FEMNIST(str(tmp_path))) == "root"


ROWS = {
    "": "x_train",
    '"5","title","text"': "root",
    '"1","title"': "root",
    '"1","title","text","more"': "root",
    '"1.7","title","text"': "root",
    b"\xff\xfe\x80": "root",
    '"1","title","' + "a" * 200_000 + '"': "root",
}


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: str(rows)[:20])
def test_a_fault_in_a_file_of_texts_is_refused(rows, tmp_path):
    assert refused_argument(lambda: AGNews(str(tmp_path), num_clients=1)) == "root"
    (tmp_path / "test.csv").write_text('"1","title","text"')
    (tmp_path / "train.csv").write_bytes(rows if isinstance(rows, bytes) else rows.encode())
    assert refused_argument(lambda: AGNews(str(tmp_path), num_clients=1)) == ROWS[rows]


def test_a_damaged_compressed_file_is_refused(tmp_path):
    content = gzip.compress(b'"1","title","text"\n' * 100)
    for wrong in (b"", b"no gzip", content[: len(content) // 2], content[:-8] + b"\0" * 8):
        for part in ("train", "test"):
            (tmp_path / f"{part}.csv.gz").write_bytes(wrong)
        assert refused_argument(lambda: AGNews(str(tmp_path), num_clients=1)) in ("root", "x_train")


def test_a_fault_in_folders_of_images_is_refused(tmp_path):
    train, test = tmp_path / "train", tmp_path / "test"
    folders = {"train_dir": str(train), "test_dir": str(test), "num_clients": 1}
    assert refused_argument(lambda: ImageFolder(**folders)) == "train_dir"
    for folder in (train / "cat", test / "cat"):
        folder.mkdir(parents=True)
        Image.fromarray(pixels(4, 4, 3)).save(folder / "1.png")
    assert refused_argument(lambda: ImageFolder(**folders, image_size=10**9)) == "image_size"
    Image.fromarray(pixels(4, 5, 3)).save(train / "cat" / "2.png")
    assert refused_argument(lambda: ImageFolder(**folders)) == "image_size"
    for wrong in (b"", b"no image", (train / "cat" / "1.png").read_bytes()[:40]):
        (train / "cat" / "2.png").write_bytes(wrong)
        assert refused_argument(lambda: ImageFolder(**folders)) == "train_dir"
    (test / "cat").rename(test / "dog")
    assert refused_argument(lambda: ImageFolder(**folders)) == "test_dir"
