"""A user's own arrays in a file."""

import numpy as np
import pytest
import torch
from helpers.data import pixels, set_up
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.data import (
    NpzFile,
)

rng = np.random.default_rng(0)


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


def test_npz_targets_of_a_regression_or_masks_pass_through(tmp_path):
    x, values, masks = rng.normal(size=(5, 7)), rng.normal(size=5), rng.integers(3, size=(5, 2, 2))
    for y, dtype in ((values, torch.float32), (masks, torch.int64)):
        np.savez(tmp_path / "own.npz", x_train=x[:3], y_train=y[:3], x_test=x[3:], y_test=y[3:])
        data = set_up(NpzFile(path=str(tmp_path / "own.npz"), num_clients=2))
        assert data.num_classes == 0 and data.y.dtype == dtype
        torch.testing.assert_close(data.y, torch.from_numpy(y).to(dtype))


GOOD = {"x_train": pixels(3, 2, 2), "y_train": [0, 1, 0], "x_test": pixels(2, 2, 2), "y_test": [0, 1]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_test": None, "y_test": None}, r"the file lacks x_test, y_test; it must hold x_train, "),
        ({"y_train": [0, 1]}, r"y_train has shape \(2,\), but must hold one label for each of the 3 samples"),
        ({"y_train": [0.0, 1.0, 0.5]}, r"has torch.float32 targets and y_test torch.int64 ones"),
        ({"y_test": [0, -1]}, r"y_test has torch\.int64 numbers from -1"),
        ({"y_test": np.array(["a", {}], dtype=object)}, r"the file is damaged or not an \.npz file of plain arrays"),
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


@pytest.mark.parametrize("dtype", [np.int16, np.int64, np.uint32])
def test_integer_arrays_of_an_npz_file_are_ids_of_words(dtype, tmp_path):
    x, y = np.arange(40, dtype=dtype).reshape(10, 4) * 100, np.arange(10) % 2
    np.savez(tmp_path / "own.npz", x_train=x[:8], y_train=y[:8], x_test=x[8:], y_test=y[8:])
    data = set_up(NpzFile(path=str(tmp_path / "own.npz"), num_clients=2))
    assert data.x.dtype == torch.int64 and data.x.tolist() == x.tolist()


WORDS, LABELS = torch.ones(4, 3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)


def test_words_have_neither_a_mean_nor_a_size(tmp_path):
    path = str(tmp_path / "own.npz")
    np.savez(path, x_train=WORDS, y_train=LABELS, x_test=WORDS, y_test=LABELS)
    with pytest.raises(
        MisconfigurationException, match=r"mean is \[0\.5\], but must be None for torch\.int64 samples; only uint8"
    ):
        NpzFile(path=path, num_clients=1, mean=(0.5,), std=(0.5,)).setup()
    with pytest.raises(MisconfigurationException, match=r"image_size is 4, but samples of shape \(4, 3\) cannot be"):
        NpzFile(path=path, num_clients=1, image_size=4).setup()
