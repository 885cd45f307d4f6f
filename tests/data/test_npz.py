"""A user's own arrays in a file, or in a file for each client."""

import os
import zipfile

import numpy as np
import pytest
import torch
from helpers.data import pixels, rng, set_up
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import NpzFile, PredefinedIndices, TimeSeriesFile


def written(folder, x, y, n=3, **more):
    """The path of a file in which the first samples are for training, and the others for tests."""
    np.savez(folder / "own.npz", x_train=x[:n], y_train=y[:n], x_test=x[n:], y_test=y[n:], **more)
    return str(folder / "own.npz")


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 3), (1, 4, 5), (3, 4, 5)])
def test_npz_images_of_every_layout_end_channels_first(shape, tmp_path):
    x = pixels(6, *shape)
    is_last = shape[-1] in (1, 3) and len(shape) == 3
    expected = x[:, None] if len(shape) == 2 else x.transpose(0, 3, 1, 2) if is_last else x
    path, channels = written(tmp_path, x, np.tile(np.arange(3, dtype=np.uint8), 2)), expected.shape[1]
    data = set_up(NpzFile(path=path, mean=(0.0,) * channels, std=(1.0,) * channels, num_clients=2))
    torch.testing.assert_close(data.x, torch.from_numpy(expected).float() / 255)
    assert set_up(NpzFile(path=path, image_size=2, num_clients=2)).x.shape == (6, channels, 2, 2)


def test_npz_floats_are_taken_as_they_are_with_their_clients(tmp_path):
    x, clients = rng.normal(size=(5, 7)), {"client_train": ["b", "a", "b"], "client_test": ["a", "b"]}
    data = set_up(NpzFile(path=written(tmp_path, x, [0, 1, 1, 0, 1], **clients)))
    assert torch.equal(data.x, torch.from_numpy(x).float())
    assert [part.tolist() for part in data.train_samples] == [[1], [0, 2]]
    assert [part.tolist() for part in data.test_samples] == [[3], [4]]


def test_npz_targets_of_a_regression_or_masks_pass_through(tmp_path):
    x, values, masks = rng.normal(size=(5, 7)), rng.normal(size=5), rng.integers(3, size=(5, 2, 2))
    for y, dtype in ((values, torch.float32), (masks, torch.int64)):
        data = set_up(NpzFile(path=written(tmp_path, x, y), num_clients=2))
        assert data.num_classes == 0 and data.y.dtype == dtype
        torch.testing.assert_close(data.y, torch.from_numpy(y).to(dtype))


@pytest.mark.parametrize("dtype", [np.int16, np.int64, np.uint32])
def test_integer_arrays_of_an_npz_file_are_ids_of_words(dtype, tmp_path):
    x = np.arange(40, dtype=dtype).reshape(10, 4) * 100
    data = set_up(NpzFile(path=written(tmp_path, x, np.arange(10) % 2, 8), num_clients=2))
    assert data.x.dtype == torch.int64 and data.x.tolist() == x.tolist()


IMAGES = {"x": pixels(2, 4, 5, 3), "y": np.arange(2)}


def write_clients(folder, **of_clients):
    for client, own in of_clients.items():
        arrays = IMAGES | own
        of_parts = {f"{name}_{part}": arrays[name] for name in "xy" for part in ("train", "test")}
        np.savez(folder / f"{client}.npz", **of_parts, **{name: own[name] for name in own if name not in IMAGES})


@pytest.mark.parametrize(
    ("own", "because"),
    [
        ({"x": np.ones((2, 3, 4, 5))}, r"x_train of 'b\.npz' is torch\.float32 of .*, and of 'a\.npz' torch\.uint8 of"),
        ({"x": pixels(2, 6, 5, 3)}, r"x_train of 'b\.npz' is .* \(2, 3, 6, 5\), and of 'a\.npz' .* \(2, 3, 4, 5\)"),
        ({"y": np.ones(2)}, r"same type and shape, because y_train of 'b\.npz' is torch\.float32"),
        ({"y": np.arange(1)}, r"y_train of 'b\.npz' is torch\.int64 of shape \(1,\), and x_train"),
        ({"x": IMAGES["x"][:0], "y": IMAGES["y"][:0]}, r"'b\.npz' has none; delete it"),
        ({"client_train": np.arange(2)}, r"without client_train, because each is of one client, and 'b\.npz' has it"),
        ({"client_test": np.arange(2)}, r"without client_test, because each is of one client, and 'b\.npz' has it"),
        (None, r"path is .*, but must be a folder with one file .*'a' has 2\."),
    ],
)
def test_files_of_clients_that_do_not_fit_together_are_refused(own, because, tmp_path):
    write_clients(tmp_path, a={}, b=own or {}, c={"y": np.arange(3), "x": pixels(3, 4, 5, 3)})
    if own is None:
        (tmp_path / "b.npz").rename(tmp_path / "a.NPZ")
    with pytest.raises(InvalidArgumentError, match=because) as error:
        NpzFile(str(tmp_path)).setup()
    assert error.value.argument == "path"


def test_clients_may_have_integers_beside_floats_and_images_of_several_layouts_and_sizes(tmp_path):
    floats = {"x": np.full((2, 3), 0.5), "y": np.array([2.5, 3.5])}
    write_clients(tmp_path, a={"x": np.ones((2, 3), int), "y": np.array([0.5, 1.5])}, b=floats)
    data = set_up(NpzFile(str(tmp_path)))
    assert data.x[:, 0].tolist() == 2 * [1.0, 1.0, 0.5, 0.5] and data.client_names == ["a", "b"]
    assert data.y[data.train_samples[1]].sort().values.tolist() == [2.5, 3.5] and data.num_classes == 0
    write_clients(tmp_path, a={}, b={"x": pixels(2, 3, 6, 7)})
    assert set_up(NpzFile(str(tmp_path), image_size=4)).x.shape == (8, 3, 4, 4)


@pytest.mark.parametrize(
    ("names", "because"),
    [
        (["x_train", "y_train", "y_test"], r"own\.npz' has no x_test"),
        (["x_train", "y_train", "x_test", "y_test", "clients_train"], "client_train, because it has clients_train"),
    ],
)
def test_an_array_that_a_file_lacks_or_a_misspelt_name_is_named(names, because, tmp_path):
    np.savez(tmp_path / "own.npz", **dict.fromkeys(names, np.ones(2)))
    with pytest.raises(InvalidArgumentError, match=f"path is .*{because}"):
        NpzFile(str(tmp_path / "own.npz")).setup()


@pytest.mark.parametrize("name", ["x_train", "y_test", "client_train"])
def test_a_member_that_is_no_array_is_named(name, tmp_path):
    arrays = dict.fromkeys(("x_train", "y_train", "x_test", "y_test"), np.ones(2))
    np.savez(tmp_path / "own.npz", **{each: array for each, array in arrays.items() if each != name})
    with zipfile.ZipFile(tmp_path / "own.npz", "a") as archive:
        archive.writestr(name, b"no array")
    with pytest.raises(InvalidArgumentError, match=rf"a file of arrays, because {name} of '.*own\.npz' is none"):
        NpzFile(str(tmp_path / "own.npz")).setup()


READERS = {
    "NpzFile": lambda path: NpzFile(path).load(),
    "TimeSeriesFile": lambda path: TimeSeriesFile(path, context_length=1, prediction_length=1).series(),
    "PredefinedIndices": lambda path: PredefinedIndices(path)(np.zeros(3), 2, rng),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_file_that_is_not_of_numpy_s_savez_is_refused(reader, tmp_path, monkeypatch):
    """Neither is a pipe waited for, nor an archive unpacked that is much larger than its file."""
    (tmp_path / "text.npz").write_text("hi")
    os.mkfifo(tmp_path / "pipe.npz")
    arrays = dict.fromkeys(("x_train", "y_train", "x_test", "y_test"), np.array([None]))
    np.savez(tmp_path / "objects.npz", **arrays)
    np.savez_compressed(tmp_path / "bomb.npz", **dict.fromkeys(arrays, np.zeros(2**17)))
    monkeypatch.setattr("fedmoe_pl.data.arrays._MOST_UNPACKED", 2**20)
    for name, reason in {
        "text": "must be an .npz file, because '.*' is of another kind",
        "pipe": "must be an .npz file, because '.*' is of another kind",
        "no": "must be an .npz file, because '.*' does not exist",
        "objects": r"objects\.npz' cannot be read: x_train: Object arrays",
        "bomb": "does not fill the memory, because its .* bytes are 4,19.,... unpacked; .* np.savez",
    }.items():
        with pytest.raises(MisconfigurationException, match=rf"^{reader}: .*{reason}"):
            READERS[reader](str(tmp_path / f"{name}.npz"))
