"""A user's own images in folders, also in one for each client."""

import os
import struct
import unicodedata
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.data import client_samples, pixels, set_up
from helpers.reports import csv_rows
from helpers.runs import federation
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch import nn
from torchvision.transforms.v2 import functional

from fedmoe_pl import PersonalizedMoE, Phase, Train
from fedmoe_pl.algorithms import Local
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import ClientFolders, ImageFolder, partition_rows, partition_table
from fedmoe_pl.data.datasets.folders import VisibleImages
from fedmoe_pl.data.datasets.images import read_images, resize
from fedmoe_pl.models import SmallMLP


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


# A folder for each client


HOSPITALS = {  # the number of images of each class
    "hospital_B": {"healthy": 4, "tumour": 2},
    "hospital_A": {"healthy": 3},
    "Klinikum Süd": {"tumour": 5, "cyst": 1},
}


def write_image(path, shade=7):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4, 3), shade, np.uint8)).save(path)


def read(folders, **arguments):
    return set_up(ClientFolders(str(folders), **{"test_fraction": 0.5, **arguments}))


@pytest.fixture
def folders(tmp_path):
    """A folder in which every image has a grey of its own."""
    shade = 0
    for hospital, classes in HOSPITALS.items():
        for name, number in classes.items():
            for index in range(number):
                write_image(tmp_path / "data" / hospital / name / f"{index}.png", shade := shade + 1)
    return tmp_path / "data"


def test_every_image_is_its_client_s_with_its_class(folders):
    data = read(folders, mean=(0.0,) * 3, std=(1.0,) * 3)
    assert data.client_names == ["Klinikum Süd", "hospital_A", "hospital_B"] and data.client_names.given
    assert data.classes == ["cyst", "healthy", "tumour"] and data.num_classes == 3
    greys = {}
    for hospital in HOSPITALS:
        for path in (folders / hospital).rglob("*.png"):
            greys[round(np.asarray(Image.open(path))[0, 0, 0] / 255, 4)] = hospital, path.parent.name
    for client, name in enumerate(data.client_names):
        samples = client_samples(data, client)
        assert len(samples) == sum(HOSPITALS[name].values()) and len(data.test_samples[client])
        found = [greys[round(grey, 4)] for grey in data.x[samples, 0, 0, 0].tolist()]
        assert [(name, data.classes[label]) for label in data.y[samples]] == found
    assert [row["name"] for row in partition_rows(data)] == data.client_names
    table = partition_table(data)
    assert "Klinikum Süd" in table and "class cyst  class healthy  class tumour" in table


def test_predictions_name_the_file_and_the_classes_of_each_image(folders, tmp_path):
    data = ClientFolders(str(folders), test_fraction=0.5)
    model = PersonalizedMoE(SmallMLP(3 * 4 * 4, num_classes=4))  # one output more than there are classes
    for expert in (model.global_expert, model.local_expert):
        nn.init.constant_(expert.classifier[-1].bias, -9.0)
        nn.init.constant_(expert.classifier[-1].bias[3:], 9.0)
    run = federation(tmp_path / "run", [Phase("it", Local(), train=Train(max_epochs=0))])
    run.fit(model, data)
    run.predict(model, data)
    rows = csv_rows(run.run_dir / "predictions.csv")
    assert len(rows) == len(data.test_samples.indices)
    for row in rows:
        *_, hospital, of_class, _ = Path(row["file"]).parts
        assert (row["name"], row["label"], row["prediction"]) == (hospital, of_class, "3")


def test_a_client_s_test_images_are_its_own(folders, tmp_path):
    for hospital in HOSPITALS:
        write_image(tmp_path / "test" / hospital / "healthy" / "1.png")
    data = read(folders, test_root=str(tmp_path / "test"), test_fraction=0.0)
    assert data.test_samples.sizes.tolist() == [1, 1, 1] and len(data.global_test) == 3


def test_folders_may_be_in_the_home_folder(folders, monkeypatch):
    monkeypatch.setenv("HOME", str(folders.parent))
    data, expected = (read(root, test_root=str(root), test_fraction=0.0) for root in (Path("~/data"), folders))
    assert data.client_names == expected.client_names and torch.equal(data.x, expected.x)


def test_classes_are_those_of_all_clients_in_a_given_order(folders):
    data = read(folders, classes=["tumour", "healthy", "cyst", "other"])
    assert data.classes[data.y[data.train_samples[1]][0]] == "healthy" and data.num_classes == 4
    for classes, reason in (
        (["tumour", "cyst", "healthy", "cyst"], "each once, because 'cyst' appears twice"),
        (["tumour", "healthy"], "because Klinikum Süd has the class 'cyst'"),
    ):
        with pytest.raises(InvalidArgumentError, match=f"classes is .*, {reason}"):
            read(folders, classes=classes)


def test_hidden_files_and_folders_are_no_clients_classes_or_samples(folders, tmp_path):
    data = read(folders)
    for hidden in (".ipynb_checkpoints/healthy/a.png", "hospital_A/__MACOSX/a.png", "hospital_A/.git/a.png"):
        write_image(folders / hidden)
    write_image(folders / "hospital_A/healthy/.ipynb_checkpoints/0-checkpoint.png")
    write_image(folders / "hospital_A/healthy/._0.png")
    again = read(folders)
    assert (again.client_names, again.classes) == (data.client_names, data.classes)
    assert torch.equal(again.x, data.x) and torch.equal(again.y, data.y)
    write_image(tmp_path / "hidden only/.a/b/0.png")
    with pytest.raises(InvalidArgumentError, match=r"root is .*, because Couldn't find any class folder in"):
        read(tmp_path / "hidden only")


def test_a_class_is_one_however_its_umlaut_is_written(folders):
    write_image(folders / "hospital_A" / "Größe" / "0.png")
    write_image(folders / "hospital_B" / unicodedata.normalize("NFD", "Größe") / "0.png")
    data = read(folders)
    assert data.classes == ["Größe", "cyst", "healthy", "tumour"]
    again = read(folders, classes=[unicodedata.normalize("NFD", name) for name in data.classes])
    assert torch.equal(again.y, data.y) and again.classes == data.classes


def test_a_misspelt_class_is_named(folders):
    (folders / "hospital_A/healthy").rename(folders / "hospital_A/helthy")
    for index in range(2):
        write_image(folders / "Klinikum Süd/healthy" / f"{index}.png")
    with pytest.warns(UserWarning, match="only hospital_A has the class 'helthy', and it lacks 'healthy'"):
        read(folders)


DEEP_IMAGES = np.arange(16, dtype=np.uint16).reshape(4, 4) * 4000, np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)
REFUSED = {
    "a client without images": (
        lambda root: (root / "empty").mkdir(),
        "every client has images, because empty has none; delete its folder",
    ),
    "an image without a class": (
        lambda root: write_image(root / "hospital_A/1.png"),
        r"hospital_A/1\.png' is in no folder of a class",
    ),
    "images of two sizes": (
        lambda root: Image.fromarray(np.zeros((5, 4, 3), np.uint8)).save(root / "hospital_A/healthy/0.png"),
        r"image_size is None, .* has 5 x 4 pixels, and .* 4 x 4 pixels",
    ),
    **{
        f"images of {values.dtype}": (
            lambda root, values=values: Image.fromarray(values).save(root / "hospital_A/healthy/x.tif"),
            r"x\.tif' has more than 8 bits per channel; .*0 to 255",
        )
        for values in DEEP_IMAGES
    },
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_folder_of_another_form_is_refused(what, folders):
    change, sentence = REFUSED[what]
    change(folders)
    with pytest.raises(MisconfigurationException, match=sentence):
        read(folders)


def test_an_image_too_large_to_be_safe_is_refused(folders, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    with pytest.raises(MisconfigurationException, match=r"cannot be read: Image size .* could be decompression bomb"):
        read(folders)
