"""Faults in files, arrays, labels, ids, folders and JSON: each is refused in one sentence, and nothing hangs."""

import gzip
import json
import zipfile

import numpy as np
import pytest
import torch
from helpers.data import Own, assert_names_an_argument, pixels
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image

from fedmoe_pl.data import FEMNIST, MNIST, AGNews, Arrays, Digits, ImageFolder, NpzFile

NAN = float("nan")


def refusal(make) -> str:
    with pytest.raises(MisconfigurationException) as error:
        make().setup()
    assert "\n" not in str(error.value) and len(str(error.value)) < 700
    return str(error.value)


GOOD = {"x_train": np.ones((4, 5)), "y_train": [0, 1, 0, 1], "x_test": np.ones((2, 5)), "y_test": [0, 1]}
ARRAYS = {  # what is wrong in an .npz file, and how the refusal says it
    "one label of 10**9": ({"y_train": [0, 1, 0, 10**9]}, "y_train has the label 1000000000, but labels must number"),
    "a label of 10**18": ({"y_test": [0, 10**18]}, "y_test has the label 1000000000000000000, but labels must"),
    "a label of 2**64 - 1": ({"y_test": np.array([0, 2**64 - 1], np.uint64)}, "y_test has torch.int64 numbers from"),
    "a label of 1.7": ({"y_train": [0, 1, 0, 1.7]}, "y_train has torch.float32 targets and y_test torch.int64 ones"),
    "a label that is nan": ({"y_train": [0, 1, 0, NAN]}, "y_train has values that are not finite"),
    "a negative label": ({"y_train": [0, 1, 0, -1]}, "y_train has torch.int64 numbers from -1"),
    "words as labels": ({"y_train": ["cat", "dog", "cat", "dog"]}, "y_train is <U3, but targets must be integers"),
    "no labels": ({"y_train": np.zeros(0, int)}, "y_train has shape (0,), but must hold one label for each of the 4"),
    "a label": ({"y_train": np.int64(3)}, "y_train has shape (), but must hold one label"),
    "labels in a column": ({"y_train": [[0], [1], [0], [1]]}, "but both must be classes, or neither"),
    "objects": (
        {"y_train": np.array([0, {}, 0, 1], object)},
        "the file is damaged or not an .npz file of plain arrays",
    ),
    "no samples": ({"x_train": np.ones((0, 5)), "y_train": np.zeros(0, int)}, "x_train has no samples"),
    "no test samples": ({"x_test": np.ones((0, 5)), "y_test": np.zeros(0, int)}, "x_test has no samples"),
    "samples without values": (
        {"x_train": np.ones((4, 0)), "x_test": np.ones((2, 0))},
        "x_train has shape (4, 0), but",
    ),
    "images without pixels": (
        {"x_train": np.zeros((4, 0, 0), np.uint8), "x_test": np.zeros((2, 0, 0), np.uint8)},
        "x_train has shape (4, 1, 0, 0), but every sample must have values",
    ),
    "one number": ({"x_train": np.float64(1.0)}, "x_train is float64 of shape (), but must be"),
    "nan in a sample": ({"x_train": np.full((4, 5), NAN)}, "x_train has values that are not finite"),
    "infinity in a sample": ({"x_test": np.full((2, 5), np.inf)}, "x_test has values that are not finite"),
    "too large for float32": ({"x_test": np.full((2, 5), 1e300)}, "x_test has values that are not finite"),
    "infinity in one sample": (
        {"x_train": [[0.0], [1.0], [np.inf], [NAN]], "x_test": [[0.0], [0.0]]},
        "x_train has values that are not finite, first in sample 2, counted from 0.",
    ),
    "nan in a sample of a client": (
        {"x_train": [[0.0], [1.0], [0.0], [NAN]], "x_test": [[0.0], [0.0]], "client_train": ["a", "b", "a", "b"]},
        "x_train has values that are not finite, first in sample 3, counted from 0, of client 'b'.",
    ),
    "nan in a target": (
        {"y_train": [0.5, NAN, 0.5, 0.5], "y_test": [0.5, 0.5], "client_train": [7, 8, 7, 8]},
        "y_train has values that are not finite, first in sample 1, counted from 0, of client '8'.",
    ),
    "complex numbers": ({"x_train": np.ones((4, 5), complex)}, "x_train is complex128 of shape (4, 5), but must be"),
    "words as samples": ({"x_train": np.full((4, 5), "a")}, "x_train is <U1 of shape (4, 5), but must be"),
    "dates as samples": ({"x_train": np.zeros((4, 5), "M8[s]")}, "x_train is datetime64[s] of shape (4, 5), but"),
    "another width": ({"x_test": np.ones((2, 6))}, "x_train has torch.float32 samples of shape (5,) and x_test"),
    "another type": ({"x_test": np.ones((2, 5), int)}, "x_train has torch.float32 samples of shape (5,) and x_test"),
    "a missing array": ({"y_test": None}, "the file lacks y_test; it must hold x_train, y_train, x_test, y_test"),
    "a client that is nan": ({"client_train": [0, 1, NAN, NAN]}, "client_train has nan, but ids must be"),
    "too few ids": ({"client_train": [0, 1]}, "client_train has shape (2,), but must hold one id for each of the 4"),
    "ids in a column": ({"client_train": [[0], [1], [0], [1]]}, "client_train has shape (4, 1), but must hold one id"),
    "an id": ({"client_train": np.int64(1)}, "client_train has shape (), but must hold one id"),
    "only ids of test samples": (
        {"client_test": [0, 1]},
        "client_train is None, but must be given where",
    ),
    "ids of two types": (
        {"client_train": [0, 1, 0, 1], "client_test": ["0", "1"]},
        "client_train has int64 ids and client_test <U1 ones, but both must be of one type",
    ),
}


@pytest.mark.parametrize("fault", ARRAYS)
def test_a_fault_in_arrays_is_refused(fault, tmp_path):
    changes, sentence = ARRAYS[fault]
    path = tmp_path / "own.npz"
    np.savez(path, **{name: array for name, array in (GOOD | changes).items() if array is not None})
    number = None if "client_train" in changes else 2
    assert sentence in refusal(lambda: NpzFile(str(path), num_clients=number))


def test_a_file_that_is_no_archive_is_refused(tmp_path):
    np.savez(tmp_path / "good.npz", **GOOD)
    content = (tmp_path / "good.npz").read_bytes()
    np.save(tmp_path / "array.npy", np.ones(3))
    with zipfile.ZipFile(tmp_path / "text.zip", "w") as archive:
        archive.writestr("x_train", "no array")
    files = {
        "empty": b"",
        "text": b"x_train: 1",
        "half": content[: len(content) // 2],
        "flipped": content[:200] + bytes([content[200] ^ 255]) + content[201:],
        "one array": (tmp_path / "array.npy").read_bytes(),
        "another archive": (tmp_path / "text.zip").read_bytes(),
    }
    for name, wrong in files.items():
        (tmp_path / "wrong.npz").write_bytes(wrong)
        sentence = refusal(lambda: NpzFile(str(tmp_path / "wrong.npz"), num_clients=2))
        assert sentence.startswith("NpzFile: path is '") and ("damaged" in sentence or "lacks" in sentence), name
    assert "there is no such file" in refusal(lambda: NpzFile(str(tmp_path), num_clients=2))
    assert "there is no such file" in refusal(lambda: NpzFile("\0", num_clients=2))


ARGUMENTS = {
    "image_size is 1000000000, but must be lower, because 1,797": lambda: Digits(image_size=10**9, num_clients=2),
    "Digits: image_size is 0, but must be an integer from 1 to 1,000,000,000.": lambda: Digits(image_size=0),
    "Digits: image_size is nan, but must be an integer from 1 to 1,000,000,000.": lambda: Digits(image_size=NAN),
    "num_clients is 1000000000, but must be from 1 to": lambda: Digits(num_clients=10**9),
    "Digits: num_clients is 2.5, but must be an integer from 1 to 1,000,000,000.": lambda: Digits(num_clients=2.5),
    "Digits: batch_size is True, but must be an integer from 1 to 1,000,000,000.": lambda: Digits(batch_size=True),
    "Digits: batch_size is 0, but must be an integer from 1 to 1,000,000,000.": lambda: Digits(batch_size=0),
    "Digits: batch_size is 9223372036854775808, but must be an integer from 1 to": lambda: Digits(batch_size=2**63),
    "Digits: global_test_size is 1000000000000000000000000000000, but must be": lambda: Digits(
        num_clients=2, global_test_size=10**30
    ),
    "Digits: test_fraction is nan, but must be in [0, 1).": lambda: Digits(test_fraction=NAN),
    "Digits: partition_seed is -1, but must be an integer of at least 0.": lambda: Digits(partition_seed=-1),
    "global_test_size is 1000000000, which takes": lambda: Digits(num_clients=2, global_test_size=10**9),
}


@pytest.mark.parametrize("sentence", ARGUMENTS)
def test_a_fault_in_arguments_is_refused(sentence):
    message = refusal(ARGUMENTS[sentence])
    assert message.startswith(sentence)
    assert_names_an_argument(message)


def test_a_normalization_that_is_not_finite_is_refused():
    images, labels = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.arange(4)
    for mean, std in (([NAN], [1.0]), ([0.0], [NAN]), ([float("inf")], [1.0]), ([0.0], [0.0]), ([0.0, 0.0], [1.0])):
        arrays = Arrays(images, labels, images, labels, mean=mean, std=std)
        assert "std is" in refusal(lambda arrays=arrays: Own(arrays, num_clients=2))


WRITER = {"x": [[0.5] * 784], "y": [1]}
LEAF = {  # the content of a JSON file, and the reason that the refusal gives
    "{": "Expecting property name",
    "": "Expecting value",
    "3": "is not a file of FEMNIST",
    "[]": "is not a file of FEMNIST",
    "null": "is not a file of FEMNIST",
    "{}": "no 'users'",
    json.dumps({"users": []}): "list no users",
    json.dumps({"users": None}): "is not a file of FEMNIST",
    json.dumps({"users": ["a"]}): "no 'user_data'",
    json.dumps({"users": ["a"], "user_data": {}}): "no 'a'",
    json.dumps({"users": ["a"], "user_data": {"a": {}}}): "no 'x'",
    json.dumps({"users": ["a"], "user_data": {"a": {"x": [[0.5] * 784]}}}): "no 'y'",
    json.dumps({"users": ["a", "a"], "user_data": {"a": WRITER}}): "writer a is listed twice",
    json.dumps({"users": ["a"], "user_data": {"a": {**WRITER, "y": [1.7]}}}): "writer a has the label 1.7, which is",
    json.dumps({"users": ["a"], "user_data": {"a": {**WRITER, "y": ["1"]}}}): "writer a has the label 1, which is",
    json.dumps({"users": ["a"], "user_data": {"a": {**WRITER, "y": [None]}}}): "writer a has the label None, which",
    json.dumps({"users": ["a"], "user_data": {"a": {**WRITER, "y": [NAN]}}}): "writer a has the label nan, which is",
    json.dumps({"users": ["a"], "user_data": {"a": {**WRITER, "y": 1}}}): "is not a file of FEMNIST",
    json.dumps({"users": ["a"], "user_data": {"a": {**WRITER, "y": [-1]}}}): "numbers from -1",
    json.dumps({"users": ["a"], "user_data": {"a": {**WRITER, "y": [10**9]}}}): "the label 1000000000",
    json.dumps({"users": ["a"], "user_data": {"a": {**WRITER, "y": [10**30]}}}): "is not a file of FEMNIST",
    json.dumps({"users": ["a"], "user_data": {"a": {**WRITER, "y": [1, 2]}}}): "1 images and 2 labels",
    json.dumps({"users": ["a"], "user_data": {"a": {**WRITER, "x": [[0.5] * 783]}}}): "cannot reshape",
    json.dumps({"users": ["a"], "user_data": {"a": {**WRITER, "x": [[None] * 784]}}}): "has values that are not",
    json.dumps({"users": ["a"], "user_data": {"a": {**WRITER, "x": [["w"] * 784]}}}): "could not convert",
    json.dumps({"users": ["a"], "user_data": {"a": {**WRITER, "x": [[NAN] * 784]}}}): "has values that are not finite",
}


@pytest.mark.parametrize("content", LEAF)
def test_a_fault_in_a_file_of_leaf_is_refused(content, tmp_path):
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "all.json").write_text(json.dumps({"users": ["a"], "user_data": {"a": WRITER}}))
    (tmp_path / "train" / "all.json").write_text(content)
    message = refusal(lambda: FEMNIST(str(tmp_path)))
    assert message.startswith(f"FEMNIST: root is '{tmp_path}'") and LEAF[content] in message


def test_a_writer_in_two_files_is_refused(tmp_path):
    for part in ("train", "test"):
        (tmp_path / part).mkdir()
        (tmp_path / part / "0.json").write_text(json.dumps({"users": ["a"], "user_data": {"a": WRITER}}))
    (tmp_path / "train" / "1.json").write_text(json.dumps({"users": ["a"], "user_data": {"a": WRITER}}))
    assert "writer a is listed twice" in refusal(lambda: FEMNIST(str(tmp_path)))


ROWS = {
    "": "x_train has no samples",
    '"5","title","text"': "begins with '5'; it must have three",
    '"1","title"': "has 2 columns",
    "no comma": "has 1 columns",
    '"1","title","text","more"': "has 4 columns",
    '"","title","text"': "begins with ''",
    '"1.7","title","text"': "begins with '1.7'",
    b"\xff\xfe\x80": "cannot be read as a CSV file",
    '"1","title","' + "a" * 200_000 + '"': "cannot be read as a CSV file (field larger than field limit",
}


@pytest.mark.parametrize("rows", ROWS, ids=lambda rows: str(rows)[:20])
def test_a_fault_in_a_file_of_texts_is_refused(rows, tmp_path):
    (tmp_path / "test.csv").write_text('"1","title","text"')
    (tmp_path / "train.csv").write_bytes(rows if isinstance(rows, bytes) else rows.encode())
    assert ROWS[rows] in refusal(lambda: AGNews(str(tmp_path), num_clients=1))


def test_a_damaged_compressed_file_is_refused(tmp_path):
    content = gzip.compress(b'"1","title","text"\n' * 100)
    for wrong in (b"", b"no gzip", content[: len(content) // 2], content[:-8] + b"\0" * 8):
        for part in ("train", "test"):
            (tmp_path / f"{part}.csv.gz").write_bytes(wrong)
        message = refusal(lambda: AGNews(str(tmp_path), num_clients=1))
        assert "cannot be read as a CSV file" in message or "x_train has no samples" in message


def test_a_fault_in_folders_of_images_is_refused(tmp_path):
    train, test = tmp_path / "train", tmp_path / "test"
    for folder in (train / "cat", test / "cat"):
        folder.mkdir(parents=True)
        Image.fromarray(pixels(4, 4, 3)).save(folder / "1.png")
    folders = {"train_dir": str(train), "test_dir": str(test), "num_clients": 1}
    assert "image_size is 1000000000, but must be lower, because 1 images" in refusal(
        lambda: ImageFolder(**folders, image_size=10**9)
    )
    assert "mean is [nan, 0.0, 0.0]" in refusal(lambda: ImageFolder(**folders, mean=(NAN, 0.0, 0.0), std=(1.0,) * 3))
    for wrong in (b"", b"no image", (train / "cat" / "1.png").read_bytes()[:40]):
        (train / "cat" / "2.png").write_bytes(wrong)
        assert "cannot be read as an image" in refusal(lambda: ImageFolder(**folders))
    (train / "cat" / "2.png").unlink()
    assert "there is no such folder" in refusal(lambda: ImageFolder(**{**folders, "test_dir": str(train / "1.png")}))
    (train / "dog").mkdir()
    assert "must hold one folder of images per class" in refusal(lambda: ImageFolder(**folders))


def test_missing_downloads_are_refused(tmp_path):
    assert "MNIST is not in" in refusal(lambda: MNIST(str(tmp_path), num_clients=2))
