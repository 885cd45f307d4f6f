"""A user's own images in folders."""

import os
import struct
import zlib

import numpy as np
import pytest
import torch
from helpers.data import pixels, set_up
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image
from torchvision.transforms.v2 import functional

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import ImageFolder
from fedmoe_pl.data.datasets.folders import VisibleImages
from fedmoe_pl.data.datasets.images import read_images, resize


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
    folders, look = (str(tmp_path / "train"), str(tmp_path / "test")), {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    data = set_up(ImageFolder(*folders, num_clients=1, **look))
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


def deep_png(values, color):
    """A PNG of 16 bits per channel, which Pillow cannot write: RGB (2), grey with alpha (4) or RGB with alpha (6)."""

    def chunk(kind, content):
        checksum = struct.pack(">I", zlib.crc32(kind + content))
        return struct.pack(">I", len(content)) + kind + content + checksum

    head = struct.pack(">IIBBBBB", values.shape[1], values.shape[0], 16, color, 0, 0, 0)
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


DEEP = {
    **{f"{color}.png": deep_png(np.arange(8 * n).reshape(2, 4, n), color) for color, n in ((2, 3), (4, 2), (6, 4))},
    "x.ppm": b"P6 2 1 65535\n" + bytes(range(12)),
}


@pytest.mark.parametrize("name", ["x.tif", "x.gif", "x.webp", "x.png"])
def test_a_file_of_several_images_is_refused_with_their_number(name, tmp_path):
    first, *others = (Image.fromarray(pixels(4, 4, 3)[::step]) for step in (1, -1, 1, -1))
    first.save(tmp_path / name)
    assert read_images("data", [str(tmp_path / name)], None).shape == (1, 3, 4, 4)
    first.save(tmp_path / name, save_all=True, append_images=others)
    with pytest.raises(MisconfigurationException, match=f"{name}' has 4 pages or frames, but must have one"):
        read_images("data", [str(tmp_path / name)], None)


def test_files_that_are_left_out_are_counted(tmp_path):
    write_images(tmp_path, {f"cat/{number}.png": (2, 2) for number in range(2)})
    write_images(tmp_path, {f"cat/{number}.gif": (2, 2) for number in range(8)})
    (tmp_path / "cat/.DS_Store").touch()
    (tmp_path / "cat/README").touch()
    left_out = r"files in train_dir '.*' are left out \(8 \.gif, 1 without an ending\), beside 2 images, .* \.jpg, "
    with pytest.warns(UserWarning, match=left_out):
        assert len(VisibleImages("data", "train_dir", str(tmp_path))) == 2


HEADER = b"\x89PNG\r\n\x1a\n"
BROKEN = {
    "empty.png": b"",
    "header.png": HEADER,
    "chunk.png": HEADER + b"\0\0\0\rIHDR" + bytes(17),
    "type.png": HEADER + b"\xff\xff\xff\xff\0\0\0\0",
    "header.ppm": b"P6",
    "word.ppm": b"P6 x y 255\n",
    "negative.ppm": b"P6 -1 5 255\n",
    "long.ppm": b"P6 99999999999999 1 255\n",
    "text.jpg": b"no image",
    "cut.gif": b"GIF89a",
    "cut.bmp": b"BM" + bytes(20),
    "cut.tif": b"II*\0\x08\0\0\0",
    "pipe.png": None,
}


@pytest.mark.parametrize("name", [*BROKEN, *DEEP])
def test_a_broken_file_or_one_of_16_bits_is_refused_in_one_sentence_that_names_it(name, tmp_path):
    path, content = tmp_path / name, (BROKEN | DEEP)[name]
    path.write_bytes(content) if content is not None else os.mkfifo(path)
    fault = "has more than 8 bits per channel" if name in DEEP else "cannot be read: "
    with pytest.raises(MisconfigurationException, match=rf"^NoneType: '{path}' {fault}[^\n]*\.$"):
        read_images(None, [str(path)], None)


@pytest.mark.parametrize("size", [(1, 200_000), (200_000, 1), (4, 401)])
def test_a_very_long_image_is_refused_before_it_is_resized(size, tmp_path, monkeypatch):
    """One of 467 bytes took 2.6 GB: its shorter side of a pixel became 32, and its longer side 6.4 million."""
    Image.new("1", size).save(tmp_path / "long.png")
    assert read_images(None, [str(tmp_path / "long.png")], None).shape == (1, 3, *size[::-1])
    monkeypatch.setattr(functional, "resize", lambda *arguments: pytest.fail("it is resized"))
    with pytest.raises(MisconfigurationException, match=rf"long\.png' has {size[0]} x {size[1]} pixels, .* 100 times"):
        read_images(None, [str(tmp_path / "long.png")], 32)


def test_images_are_resized_in_parts_of_some_pixels(monkeypatch):
    """As torchvision resizes all at once."""
    images, parts = torch.from_numpy(pixels(5, 40, 6, 3)).permute(0, 3, 1, 2), []
    expected = functional.center_crop(functional.resize(images.contiguous(), [8]), [8])
    monkeypatch.setattr("fedmoe_pl.data.datasets.images._PIXELS_AT_ONCE", 2 * 8 * 54)
    own = functional.resize
    monkeypatch.setattr(functional, "resize", lambda x, size: parts.append(len(x)) or own(x, size))
    assert torch.equal(resize(None, images, 8), expected) and parts == [2, 2, 1]
