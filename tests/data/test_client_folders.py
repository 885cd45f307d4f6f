"""Images in a folder for each client, and tables with a column or a file for each client."""

import csv
import unicodedata
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.reports import csv_rows
from helpers.runs import federation
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image
from torch import nn

from fedmoe_pl import PersonalizedMoE, Phase, Train
from fedmoe_pl.algorithms import Local
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import ClientFolders, CsvFile, NpzFile, partition_rows, partition_table
from fedmoe_pl.models import SmallMLP

HOSPITALS = {  # the number of images of each class
    "hospital_B": {"healthy": 4, "tumour": 2},
    "hospital_A": {"healthy": 3},
    "Klinikum Süd": {"tumour": 5, "cyst": 1},
}


def samples_of(data, client):
    """Indices of a client's samples in the order of the files, whichever part they are in."""
    return torch.cat([data.train_samples[client], data.test_samples[client]]).sort().values


def write_image(path, shade):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((4, 4, 3), shade, np.uint8)).save(path)


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
    data = ClientFolders(str(folders), mean=(0.0,) * 3, std=(1.0,) * 3, test_fraction=0.5)
    data.setup()
    assert data.client_names == ["Klinikum Süd", "hospital_A", "hospital_B"] and data.client_names.given
    assert data.classes == ["cyst", "healthy", "tumour"] and data.num_classes == 3
    greys = {}
    for hospital in HOSPITALS:
        for path in (folders / hospital).rglob("*.png"):
            greys[round(np.asarray(Image.open(path))[0, 0, 0] / 255, 4)] = hospital, path.parent.name
    for client, name in enumerate(data.client_names):
        samples = samples_of(data, client)
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
        write_image(tmp_path / "test" / hospital / "healthy" / "1.png", 200)
    data = ClientFolders(str(folders), test_root=str(tmp_path / "test"))
    data.setup()
    assert data.test_samples.sizes.tolist() == [1, 1, 1] and len(data.global_test) == 3


def test_classes_are_those_of_all_clients_in_a_given_order(folders):
    data = ClientFolders(str(folders), classes=["tumour", "healthy", "cyst", "other"], test_fraction=0.5)
    data.setup()
    assert data.classes[data.y[data.train_samples[1]][0]] == "healthy" and data.num_classes == 4
    with pytest.raises(InvalidArgumentError, match=r"classes is .*, each once, because 'cyst' appears twice"):
        ClientFolders(str(folders), classes=["tumour", "cyst", "healthy", "cyst"]).setup()
    with pytest.raises(InvalidArgumentError, match=r"classes is .*, because Klinikum Süd has the class 'cyst'"):
        ClientFolders(str(folders), classes=["tumour", "healthy"]).setup()


def test_hidden_files_and_folders_are_no_clients_classes_or_samples(folders):
    data = ClientFolders(str(folders), test_fraction=0.5)
    data.setup()
    for hidden in (".ipynb_checkpoints/healthy/a.png", "hospital_A/__MACOSX/a.png", "hospital_A/.git/a.png"):
        write_image(folders / hidden, 7)
    write_image(folders / "hospital_A/healthy/.ipynb_checkpoints/0-checkpoint.png", 7)
    write_image(folders / "hospital_A/healthy/._0.png", 7)
    again = ClientFolders(str(folders), test_fraction=0.5)
    again.setup()
    assert (again.client_names, again.classes) == (data.client_names, data.classes)
    assert torch.equal(again.x, data.x) and torch.equal(again.y, data.y)


@pytest.mark.parametrize("values", [np.arange(16, dtype=np.uint16) * 4000, np.linspace(0, 1, 16, dtype=np.float32)])
def test_images_of_more_than_8_bits_are_refused(folders, values):
    Image.fromarray(values.reshape(4, 4)).save(folders / "hospital_A/healthy/x.tif")
    with pytest.raises(MisconfigurationException, match=r"x\.tif' has more than 8 bits per channel; .*0 to 255"):
        ClientFolders(str(folders), test_fraction=0.5).setup()


def test_a_class_is_one_however_its_umlaut_is_written(folders):
    write_image(folders / "hospital_A" / "Größe" / "0.png", 7)
    write_image(folders / "hospital_B" / unicodedata.normalize("NFD", "Größe") / "0.png", 7)
    data = ClientFolders(str(folders), test_fraction=0.5)
    data.setup()
    assert data.classes == ["Größe", "cyst", "healthy", "tumour"]
    given = [unicodedata.normalize("NFD", name) for name in data.classes]
    again = ClientFolders(str(folders), classes=given, test_fraction=0.5)
    again.setup()
    assert torch.equal(again.y, data.y) and again.classes == data.classes


def test_a_folder_that_has_hidden_folders_only_is_refused(tmp_path):
    write_image(tmp_path / ".a" / "b" / "0.png", 7)
    with pytest.raises(InvalidArgumentError, match=r"root is .*, because Couldn't find any class folder in"):
        ClientFolders(str(tmp_path), test_fraction=0.5).setup()


def test_a_misspelt_class_is_named(folders):
    (folders / "hospital_A/healthy").rename(folders / "hospital_A/helthy")
    for index in range(2):
        write_image(folders / "Klinikum Süd/healthy" / f"{index}.png", 100)
    with pytest.warns(UserWarning, match="only hospital_A has the class 'helthy', and it lacks 'healthy'"):
        ClientFolders(str(folders), test_fraction=0.5).setup()


def test_a_folder_of_another_form_is_refused(folders):
    (folders / "empty").mkdir()
    with pytest.raises(
        InvalidArgumentError, match="every client has images, because empty has none; delete its folder"
    ):
        ClientFolders(str(folders), test_fraction=0.5).setup()
    (folders / "empty").rmdir()
    write_image(folders / "hospital_A/1.png", 9)
    with pytest.raises(InvalidArgumentError, match=r"hospital_A/1\.png' is in no folder of a class"):
        ClientFolders(str(folders), test_fraction=0.5).setup()
    (folders / "hospital_A/1.png").unlink()
    Image.fromarray(np.zeros((5, 4, 3), np.uint8)).save(folders / "hospital_A/healthy/0.png")
    with pytest.raises(InvalidArgumentError, match=r"image_size is None, .* has 5 x 4 pixels, and .* 4 x 4 pixels"):
        ClientFolders(str(folders), test_fraction=0.5).setup()


def write_table(path, rows):
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def test_a_table_has_a_column_of_clients(tmp_path):
    rows = [["site", "age", "dose", "outcome"], ["b", 1, 2.5, "bad"], ["a", 3, 4, "good"], ["b", 5, 6, "good"]]
    write_table(tmp_path / "table.csv", rows)
    data = CsvFile(str(tmp_path / "table.csv"), target="outcome", client="site", test_fraction=0.5)
    data.setup()
    assert data.client_names == ["a", "b"] and data.classes == ["bad", "good"]
    assert data.x[samples_of(data, 1)].tolist() == [[1, 2.5], [5, 6]]
    assert data.y[samples_of(data, 1)].tolist() == [0, 1]


@pytest.mark.parametrize("made", [CsvFile, NpzFile])
def test_a_client_may_have_a_file(tmp_path, made):
    for name, ages in {"x": [1.5, 2.5], "y": [3.5]}.items():
        if made is CsvFile:
            write_table(tmp_path / f"{name}.csv", [["age", "risk"], *([age, 2 * age] for age in ages)])
        else:
            x, y = np.array(ages, np.float32)[:, None], 2 * np.array(ages, np.float32)
            np.savez(tmp_path / f"{name}.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    data = CsvFile(str(tmp_path), "risk", test_path=str(tmp_path)) if made is CsvFile else NpzFile(str(tmp_path))
    data.setup()
    assert data.client_names == ["x", "y"] and data.num_classes == 0
    assert data.y[data.train_samples[1]].tolist() == [7.0] and data.x[data.train_samples[0]].tolist() == [[1.5], [2.5]]


@pytest.mark.parametrize(
    ("cell", "sentence"),
    [("old", "line 2 of '.*' has 'old' in the column 'age'"), ("", "in line 2 of '.*', the column 'age' is empty")],
)
def test_a_cell_that_is_no_number_is_named(tmp_path, cell, sentence):
    write_table(tmp_path / "table.csv", [["site", "age", "outcome"], ["a", cell, "bad"]])
    with pytest.raises(InvalidArgumentError, match=sentence):
        CsvFile(str(tmp_path / "table.csv"), target="outcome", client="site").setup()


@pytest.mark.parametrize(
    ("header", "row", "sentence"),
    [
        (
            ["", "site", "age", "outcome"],
            ["0", "a", "5", "bad"],
            "has a column without a name, as pandas writes row",
        ),
        (["site", "age", "age", "outcome"], ["a", "5", "6", "bad"], "has several columns 'age'"),
        (["site", "age", "outcome"], ["a", "7", "5", "bad"], "line 2 of '.*' has more cells than there are columns"),
    ],
)
def test_a_table_whose_columns_would_be_mistaken_is_refused(tmp_path, header, row, sentence):
    write_table(tmp_path / "table.csv", [header, row])
    with pytest.raises(InvalidArgumentError, match=sentence):
        CsvFile(str(tmp_path / "table.csv"), target="outcome", client="site").setup()


@pytest.mark.parametrize(
    ("text", "encoding", "sentence"),
    [
        ("site,größe,y\na,1,0\n", "cp1252", r"a CSV file in UTF-8, because '.*table\.csv' has another encoding; of Ex"),
        ("site,y\na,0\n", "utf-8", "a table with a column of numbers, beside those of targets and clients"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused(tmp_path, text, encoding, sentence):
    (tmp_path / "table.csv").write_text(text, encoding=encoding)
    with pytest.raises(InvalidArgumentError, match=sentence):
        CsvFile(str(tmp_path / "table.csv"), "y", "site", test_fraction=0.5).setup()


def test_a_column_that_only_some_files_have_is_refused(tmp_path):
    write_table(tmp_path / "a.csv", [["x", "y"], [1, 0], [2, 1]])
    write_table(tmp_path / "b.csv", [["x", "dose", "y"], [1, 5, 0], [2, 5, 1]])
    with pytest.raises(InvalidArgumentError, match=r"'.*b\.csv' has a column 'dose', and '.*a\.csv' has none"):
        CsvFile(str(tmp_path), "y", test_fraction=0.5).setup()


def test_commas_at_the_ends_of_lines_are_no_column(tmp_path):
    write_table(tmp_path / "table.csv", [["site", "x", "y"], ["a", 1, 0, ""], ["a", 2, 1, ""]])
    data = CsvFile(str(tmp_path / "table.csv"), "y", "site", test_fraction=0.5)
    data.setup()
    assert data.columns == ["x"] and data.x.sort(0).values.tolist() == [[1.0], [2.0]]


def test_columns_have_one_order_and_files_of_clients_may_be_hidden_or_in_capitals(tmp_path):
    write_table(tmp_path / "a.csv", [["b", "a", "y"], [1.5, 2.5, 0], [3.5, 4.5, 1]])
    write_table(tmp_path / "B.CSV", [["y", "a", "b"], [0, 6.5, 5.5], [1, 8.5, 7.5]])
    (tmp_path / "._a.csv").write_bytes(b"\xff")
    data = CsvFile(str(tmp_path), "y", test_fraction=0.5)
    data.setup()
    assert data.client_names == ["B", "a"]
    assert data.x[samples_of(data, 1)].tolist() == [[2.5, 1.5], [4.5, 3.5]]
    assert data.x[samples_of(data, 0)].tolist() == [[6.5, 5.5], [8.5, 7.5]]
    write_table(tmp_path / "c.csv", [["y", "a", "b"]])
    with pytest.raises(InvalidArgumentError, match=r"with rows.*, because '.*c\.csv' has none"):
        CsvFile(str(tmp_path), "y", test_fraction=0.5).setup()


@pytest.mark.parametrize(
    ("labels", "classes", "num_classes", "refusal"),
    [
        ("0 1 1.0 0", None, 0, r"target is 'y', .* argument classes .* because line 4 of '.*' has '1\.0', which"),
        ("-1 +1 +1 -1", None, 0, r"because line 3 of '.*' has '\+1', which"),
        ("-1 +1 +1 -1", ["-1", "+1"], 2, None),
        ("2 1.0 1.5 0", None, 0, None),
        ("0.0 1.0 1.0 0.0", None, 0, None),
        ("0.0 1.0 1.0 0.0", ["0.0", "1.0"], 2, None),
        ("0 1 1.0 0", ["0", "1"], 0, r"because a has the class '1\.0'"),
        ("01 0 1 0", None, 0, r"classes is None, .* because client a has '01' and '1'\."),
        ("01 0 1 0", ["0", "1", "01"], 3, None),
        ("01 02 02 01", None, 2, None),
    ],
)
def test_targets_are_classes_or_values_beyond_doubt(tmp_path, labels, classes, num_classes, refusal):
    write_table(tmp_path / "table.csv", [["site", "x", "y"], *(["a", 1, label] for label in labels.split())])
    data = CsvFile(str(tmp_path / "table.csv"), "y", "site", classes=classes, test_fraction=0.5)
    for _ in range(2):
        with nullcontext() if refusal is None else pytest.raises(InvalidArgumentError, match=refusal):
            data.setup()
    assert refusal is not None or data.num_classes == num_classes


def test_a_number_that_two_clients_write_in_several_ways_is_refused(tmp_path):
    write_table(tmp_path / "table.csv", [["site", "x", "y"], ["a", 1, "01"], ["b", 1, "1"]])
    with pytest.raises(InvalidArgumentError, match="because client a has '01' and client b '1'"):
        CsvFile(str(tmp_path / "table.csv"), "y", "site").setup()


def test_images_of_a_table_are_read(tmp_path):
    write_image(tmp_path / "images/1.png", 51)
    write_table(tmp_path / "table.csv", [["site", "file", "outcome"], *[["a", "images/1.png", "bad"]] * 2])
    look = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
    data = CsvFile(str(tmp_path / "table.csv"), "outcome", "site", images="file", test_fraction=0.5, **look)
    data.setup()
    torch.testing.assert_close(data.x, torch.full((2, 3, 4, 4), 0.2))
    assert data.files == 2 * [str(tmp_path / "images/1.png")]


def test_an_image_too_large_to_be_safe_is_refused(folders, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 4)
    with pytest.raises(MisconfigurationException, match=r"cannot be read: Image size .* could be decompression bomb"):
        ClientFolders(str(folders), test_fraction=0.5).setup()
