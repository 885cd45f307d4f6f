"""Tables: whose rows they have, which targets are classes, and what is damaged or missing is refused with its line."""

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from helpers.data import client_samples, set_up
from PIL import Image

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import CsvFile

ROWS = ["x,y,site", *(f"{number},{'ab'[number % 2]},{number % 3}" for number in range(60))]


def table(tmp_path, lines, encoding="utf-8", **arguments):
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n", encoding=encoding)
    return CsvFile(str(tmp_path / "table.csv"), "y", "site", test_fraction=0.5, **arguments)


def refused(data):
    with pytest.raises(InvalidArgumentError) as error:
        data.setup()
    assert "\n" not in str(error.value)
    return str(error.value)


def with_lines(changes):
    return [changes.get(number, line) for number, line in enumerate(ROWS, start=1)]


def test_a_table_has_a_column_of_clients(tmp_path):
    data = set_up(table(tmp_path, ["site,age,dose,y", "b,1,2.5,bad", "a,3,4,good", "b,5,6,good"]))
    assert data.client_names == ["a", "b"] and data.classes == ["bad", "good"]
    samples = client_samples(data, 1)
    assert data.x[samples].tolist() == [[1, 2.5], [5, 6]] and data.y[samples].tolist() == [0, 1]


def test_a_client_may_have_a_file(tmp_path):
    for name, lines in {"x": ["age,risk", "1.5,3.0", "2.5,5.0"], "y": ["age,risk", "3.5,7.0"]}.items():
        (tmp_path / f"{name}.csv").write_text("\n".join(lines))
    data = set_up(CsvFile(str(tmp_path), "risk", test_path=str(tmp_path)))
    assert data.client_names == ["x", "y"] and data.num_classes == 0
    assert data.y[data.train_samples[1]].tolist() == [7.0] and data.x[data.train_samples[0]].tolist() == [[1.5], [2.5]]


def test_columns_have_one_order_and_files_of_clients_may_be_hidden_or_in_capitals(tmp_path):
    (tmp_path / "a.csv").write_text("b,a,y\n1.5,2.5,0\n3.5,4.5,1\n")
    (tmp_path / "B.CSV").write_text("y,a,b\n0,6.5,5.5\n1,8.5,7.5\n")
    (tmp_path / "._a.csv").write_bytes(b"\xff")
    data = set_up(CsvFile(str(tmp_path), "y", test_fraction=0.5))
    assert data.client_names == ["B", "a"]
    assert data.x[client_samples(data, 1)].tolist() == [[2.5, 1.5], [4.5, 3.5]]
    assert data.x[client_samples(data, 0)].tolist() == [[6.5, 5.5], [8.5, 7.5]]
    for content, sentence in (("y,a,b\n", "c.csv' has none"), ("y,a,b,c\n1,2,3,4\n", "c.csv' has a column 'c', and '")):
        (tmp_path / "c.csv").write_text(content)
        assert sentence in refused(CsvFile(str(tmp_path), "y", test_fraction=0.5))


def test_quotes_empty_lines_and_commas_at_the_ends_of_lines_are_read(tmp_path):
    lines = [each for row in with_lines({21: '"19","b","say ""0"", or 1"'}) for each in (row, "")]
    data = set_up(table(tmp_path, lines))
    assert len(data.y) == 60 and 'say "0", or 1' in data.client_names and data.num_classes == 2
    data = set_up(table(tmp_path, ["site,x,y", "a,1,0,", "a,2,1,"]))
    assert data.columns == ["x"] and data.x.sort(0).values.tolist() == [[1.0], [2.0]]


def test_images_of_a_table_are_read(tmp_path):
    (tmp_path / "images").mkdir()
    Image.fromarray(np.full((4, 4, 3), 51, np.uint8)).save(tmp_path / "images/1.png")
    lines = ["site,file,y", *["a,images/1.png,bad"] * 2]
    data = set_up(table(tmp_path, lines, images="file", mean=(0.0,) * 3, std=(1.0,) * 3))
    torch.testing.assert_close(data.x, torch.full((2, 3, 4, 4), 0.2))
    assert data.files == 2 * [str(tmp_path / "images/1.png")]


REFUSED = {
    "a number": (["site,x,y", "a,old,0"], "line 2 of 'FILE' has 'old' in the column 'x'"),
    "a cell": (["site,x,y", "a,,0"], "line 2 of 'FILE' has nothing in the column 'x'"),
    "a column of targets": (
        ["site,x,z", "a,5,0,"],
        "a table with a column 'y', because those of 'FILE' are site, x, z",
    ),
    "a name": ([",site,x,y", "0,a,5,0"], "has a column without a name, as pandas writes row"),
    "one name": (["site,x,x,y", "a,5,6,0"], "has several columns 'x'"),
    "a column": (["site,x,y", "a,7,5,0"], "line 2 of 'FILE' has more cells than there are columns"),
    "numbers": (["site,y", "a,0"], "a table with a column of numbers, beside those of targets and clients"),
    "one way to write 1": (["site,x,y", "a,1,01", "b,1,1"], "because client a has '01' and client b '1'"),
    "a finite number": (["x,y,site", "1.5,1.5,0", "inf,1.5,0"], "line 3 of 'FILE' has 'inf'"),
    "a finite target": (["x,y,site", "1.5,1.5,0", "1.5,-inf,0"], "line 3 of 'FILE' has '-inf'"),
    # the 20 rows between would be one class
    "the end of a quote": (with_lines({21: '19,"a,0', 41: '39,a",0'}), "a quote in or after line 21 of "),
    "the end of a class": (with_lines({21: '19,"a,0'}), "a quote in or after line 21 of "),
    "a cell that csv reads": (with_lines({2: '"0,a,0', 60: 130 * 1024 * "1"}), "a quote in or after line 2 of "),
    "the end of the names": (with_lines({1: '"x,y,site', 3: '1",b,1'}), "a quote in or after line 1 of "),
    "the end of the file": (with_lines({61: '59,b,"2'}), "a quote in or after line 61 of "),
}


@pytest.mark.parametrize("lacks", REFUSED)
def test_a_table_that_lacks_something_or_would_be_mistaken_is_refused(lacks, tmp_path):
    lines, sentence = REFUSED[lacks]
    assert sentence.replace("FILE", f"{tmp_path}/table.csv") in refused(table(tmp_path, lines))


def test_a_path_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"No such file or directory: '{tmp_path}/tables'"):
        CsvFile(str(tmp_path / "tables"), "y").setup()


def test_another_encoding_is_refused(tmp_path):
    refusal = refused(table(tmp_path, ["site,größe,y", "a,1,0"], "cp1252"))
    assert f"a CSV file in UTF-8, because '{tmp_path}/table.csv' has another encoding; of Ex" in refusal


@pytest.mark.parametrize("missing", ["nan", "NaN", "-nan", "NaT", "<NA>", "NA", "N/A", "None", "null", "#N/A"])
@pytest.mark.parametrize("column", range(3))
def test_a_cell_without_a_value_is_no_class_client_or_number(missing, column, tmp_path):
    cells = ROWS[20].split(",")
    cells[column] = missing
    text = refused(table(tmp_path, with_lines({21: ",".join(cells)})))
    assert f"line 21 of '{tmp_path}/table.csv' has '{missing}' in the column '{['x', 'y', 'site'][column]}'" in text


def test_a_class_may_be_called_nan_where_the_user_says_so(tmp_path):
    data = set_up(table(tmp_path, [*ROWS, "1,nan,0"], classes=["a", "b", "nan"]))
    assert data.y.tolist()[-1] == 2


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
        ("20_30 40_50 40_50 20_30", None, 2, None),  # which Python reads as 2030 and 4050
    ],
)
def test_targets_are_classes_or_values_beyond_doubt(tmp_path, labels, classes, num_classes, refusal):
    data = table(tmp_path, ["site,x,y", *(f"a,1,{label}" for label in labels.split())], classes=classes)
    for _ in range(2):
        with nullcontext() if refusal is None else pytest.raises(InvalidArgumentError, match=refusal):
            data.setup()
    assert refusal is not None or data.num_classes == num_classes
