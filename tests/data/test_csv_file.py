"""Tables that are damaged, or have cells without a value, are refused with the line."""

import pytest

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import CsvFile

ROWS = ["x,y,site", *(f"{number},{'ab'[number % 2]},{number % 3}" for number in range(60))]


def refused(tmp_path, lines, **arguments):
    (tmp_path / "table.csv").write_text("\n".join(lines) + "\n")
    with pytest.raises(InvalidArgumentError) as error:
        CsvFile(str(tmp_path / "table.csv"), "y", "site", test_fraction=0.5, **arguments).setup()
    assert "\n" not in str(error.value)
    return str(error.value)


def with_lines(changes):
    return [changes.get(number, line) for number, line in enumerate(ROWS, start=1)]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({21: '19,"a,0', 41: '39,a",0'}, 21),  # the 20 rows between would be one class
        ({21: '19,"a,0'}, 21),
        ({2: '"0,a,0', 60: 130 * 1024 * "1"}, 2),  # a cell that is longer than csv reads
        ({1: '"x,y,site', 3: '1",b,1'}, 1),
        ({61: '59,b,"2'}, 61),
    ],
)
def test_a_quote_that_is_not_closed_is_refused_with_its_line(changes, line, tmp_path):
    assert f"a quote in or after line {line} of " in refused(tmp_path, with_lines(changes))


def test_quotes_and_empty_lines_are_read(tmp_path):
    lines = [each for row in with_lines({21: '"19","b","say ""0"", or 1"'}) for each in (row, "")]
    (tmp_path / "table.csv").write_text("\n".join(lines))
    data = CsvFile(str(tmp_path / "table.csv"), "y", "site", test_fraction=0.5)
    data.setup()
    assert len(data.y) == 60 and 'say "0", or 1' in data.client_names and data.num_classes == 2


@pytest.mark.parametrize("missing", ["nan", "NaN", "-nan", "NaT", "<NA>", "NA", "N/A", "None", "null", "#N/A"])
@pytest.mark.parametrize("column", range(3))
def test_a_cell_without_a_value_is_no_class_client_or_number(missing, column, tmp_path):
    cells = ROWS[20].split(",")
    cells[column] = missing
    text = refused(tmp_path, with_lines({21: ",".join(cells)}))
    assert f"line 21 of '{tmp_path}/table.csv' has '{missing}' in the column '{['x', 'y', 'site'][column]}'" in text


@pytest.mark.parametrize("column", ["x", "y"])
def test_an_infinite_number_is_refused_with_its_line(column, tmp_path):
    lines = ["x,y,site", *(f"{number}.5,{number}.5,{number % 3}" for number in range(60))]
    lines[20] = {"x": "inf,1.5,0", "y": "1.5,-inf,0"}[column]
    assert f"line 21 of '{tmp_path}/table.csv' has '" in refused(tmp_path, lines)


def test_a_class_may_be_called_nan_where_the_user_says_so(tmp_path):
    (tmp_path / "table.csv").write_text("\n".join([*ROWS, "1,nan,0"]))
    data = CsvFile(str(tmp_path / "table.csv"), "y", "site", classes=["a", "b", "nan"], test_fraction=0.5)
    data.setup()
    assert data.y.tolist()[-1] == 2
