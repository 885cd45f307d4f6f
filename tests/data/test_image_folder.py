"""A user's own images in folders."""

import numpy as np
import torch
from helpers.data import pixels, set_up
from PIL import Image

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
