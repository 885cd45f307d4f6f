"""Images in a folder for each client."""

import unicodedata
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.data import client_samples, set_up
from helpers.reports import csv_rows
from helpers.runs import federation
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch import nn

from fedmoe_pl import PersonalizedMoE, Phase, Train
from fedmoe_pl.algorithms import Local
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import ClientFolders, partition_rows, partition_table
from fedmoe_pl.models import SmallMLP

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


DEEP = np.arange(16, dtype=np.uint16).reshape(4, 4) * 4000, np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4)
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
        for values in DEEP
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
