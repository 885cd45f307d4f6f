"""A user's own images in folders."""

import numpy as np
import pytest
import torch
from helpers.data import pixels, set_up
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image

from fedmoe_pl.data import (
    ImageFolder,
)


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
