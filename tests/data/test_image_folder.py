"""A user's own images in folders."""

import numpy as np
import pytest
import torch
from helpers.data import pixels, set_up
from PIL import Image

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import ImageFolder


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


@pytest.mark.parametrize(
    ("exif", "is_turned"),
    [(b"Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6\0\0" + 4 * b"\0", True), (b"Exif\0\0none", False)],
)
def test_photographs_are_rotated_according_to_their_exif_orientation(tmp_path, exif, is_turned):
    image = pixels(2, 3, 3)
    for part in ("train", "test"):
        (tmp_path / part / "cat").mkdir(parents=True)
        Image.fromarray(image).save(tmp_path / part / "cat/1.png", exif=exif)
    data = set_up(
        ImageFolder(str(tmp_path / "train"), str(tmp_path / "test"), num_clients=1, mean=(0.0,) * 3, std=(1.0,) * 3)
    )
    upright = np.rot90(image, -1) if is_turned else image  # 6 means: turn it clockwise
    torch.testing.assert_close(data.x[0], torch.from_numpy(upright.copy()).permute(2, 0, 1).float() / 255)


@pytest.mark.parametrize("as_argument", [True, False])
def test_classes_are_numbered_in_a_given_order(tmp_path, as_argument):
    for part in ("train", "test"):
        write_images(tmp_path / part, {"dog/1.png": (2, 2)})
    data, classes = ImageFolder(str(tmp_path / "train"), str(tmp_path / "test"), num_clients=1), ["cat", "dog"]
    if as_argument:
        data = ImageFolder(data.train_dir, data.test_dir, classes=classes, num_clients=1)
    else:  # as for new clients of a federation
        data.classes = classes
    assert set_up(data).y.tolist() == [1, 1] and data.num_classes == 2 and data.classes == classes
    write_images(tmp_path / "test", {"eel/1.png": (2, 2)})
    with pytest.raises(InvalidArgumentError, match=r"the names of all classes, because '.*/test' has the class 'eel'"):
        ImageFolder(data.train_dir, data.test_dir, num_clients=1).setup()
