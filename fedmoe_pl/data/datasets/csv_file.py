"""A user's own table, in CSV files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.class_names import numbered_classes
from fedmoe_pl.data.client_names import are_integers, files_of_clients
from fedmoe_pl.data.datasets.images import ImageDataModule, read_images

# what pandas, R, databases and Excel write for no value
_MISSING = ("nan", "-nan", "nat", "na", "<na>", "n/a", "#n/a", "#na", "null", "none")


class CsvFile(ImageDataModule):
    """A user's own table, in one CSV file with a column of clients, or in a file for each client.

    The other columns are numbers, which are not changed, or one of them has the files of images. The inputs of a sample
    are these numbers in the sorted order of the columns' names. Targets that are all numbers, and not all of them
    integers, are values, as those of a regression, unless ``classes`` is given, so write whole values with a decimal
    point; others are the names of classes, which are numbered in sorted order, integers by their size, except that -100
    says that a training sample has no label (see :class:`Arrays`), unless ``classes`` has it. A cell without a value
    (empty, or ``nan``, ``NaT``, ``<NA>``, ``NA``, ``N/A``, ``None``, ``null``) is refused unless ``classes`` has it,
    and so is a quoted cell of several lines.

    Args:
        path: the file; or a folder with a file for each client, who is called as the file without its ``.csv``.
        target: the column of the targets.
        client: the column of the clients' names; None if each has a file.
        images: the column of the images' files, relative to the folder of the table; None for numbers.
        test_path: file or folder like ``path`` of test samples; None to hold out ``test_fraction`` of each client's.
        classes: names of all classes, in the order of their numbers; others are refused. None for those in the table.
            Needed in a deployed federation, where no client sees the tables of the others.
        **kwargs: arguments of ``ImageDataModule``.
    """

    def __init__(
        self,
        path: str,
        target: str,
        client: str | None = None,
        images: str | None = None,
        test_path: str | None = None,
        classes: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(pool=test_path is None, **kwargs)
        self.path = path
        self.target = target
        self.client = client
        self.images = images
        self.test_path = test_path
        self.classes = classes

    def load(self) -> Arrays:
        """Reads the tables, and the images that they name."""
        rows = self._rows("path", self.path)
        number = len(rows)
        if self.test_path is not None:
            rows += self._rows("test_path", self.test_path)
        clients, targets = [row.client for row in rows], [row.cell(self, self.target) for row in rows]
        x, y = self._inputs(rows), None if self.classes else _values(targets)
        if y is not None:
            self._check_values(rows, targets, y)
        else:
            y = numbered_classes(self, targets, clients)
        ids = np.array(clients)
        return Arrays(
            *(x[:number], y[:number], x[number:], y[number:], ids[:number], ids[number:]), mean=self.mean, std=self.std
        )

    def _check_values(self, rows: Sequence[_Row], targets: Sequence[str], y: Tensor) -> None:
        """Refuses whole numbers of which some, such as 1.0 or +1, are no classes: nobody knows what the others are."""
        if wrong := [row for row, value in zip(rows, y.tolist(), strict=True) if not math.isfinite(value)]:
            because = f"line {wrong[0].line} of '{wrong[0].path}' has '{wrong[0].cell(self, self.target)}'"
            raise InvalidArgumentError(self, "target", self.target, "a column of finite numbers or of classes", because)
        others = [row for row, text in zip(rows, targets, strict=True) if not are_integers([text])]
        if len(others) < len(rows) and torch.equal(y, y.round()):
            first, text = others[0], others[0].cell(self, self.target)
            allowed = (
                "a column of classes, which the argument classes names, or of values that all have a decimal point"
            )
            because = f"line {first.line} of '{first.path}' has '{text}', which may be a class or a value"
            raise InvalidArgumentError(self, "target", self.target, allowed, because)

    def _inputs(self, rows: Sequence[_Row]) -> Tensor:
        """Images, uint8, or the numbers of all other columns, float32, shape (n, columns)."""
        if self.images is not None:
            paths = [str(row.path.parent / row.cell(self, self.images)) for row in rows]
            self.files = paths
            return read_images(self, paths, self.image_size)
        # sorted, because clients' files may have them in different orders, also on other machines
        columns = sorted(name for name in rows[0].cells if name not in (self.target, self.client, None))
        if not columns:
            allowed = "a table with a column of numbers, beside those of targets and clients"
            raise InvalidArgumentError(self, "path", self.path, allowed)
        for row in {row.path: row for row in rows}.values():  # the rows of a file have the same columns
            if extra := [name for name in row.cells if name is not None and name not in rows[0].cells]:
                because = f"'{row.path}' has a column '{extra[0]}', and '{rows[0].path}' has none"
                raise InvalidArgumentError(self, "path", self.path, "tables of the same columns", because)
        self.columns = columns
        return torch.tensor([[row.number(self, column) for column in columns] for row in rows])

    def _rows(self, argument: str, path: str) -> list[_Row]:
        """The rows of a file, or of all files of a folder."""
        is_folder = Path(path).is_dir()
        if (self.client is None) != is_folder and Path(path).exists():
            kind = "a folder with a file for each client" if is_folder else "one file"
            allowed, because = "left out" if is_folder else "a column", f"{argument} '{path}' is {kind}"
            raise InvalidArgumentError(self, "client", self.client, allowed, because)
        files = files_of_clients(self, argument, Path(path), ".csv") if self.client is None else [Path(path)]
        rows, allowed = list[_Row](), "a CSV file with rows, or a folder of such files"
        for each in files:
            before = len(rows)
            try:
                text = each.read_text(encoding="utf-8-sig")
            except UnicodeDecodeError as error:
                because = f"'{each}' has another encoding; of Excel's formats, 'CSV UTF-8' is the right one"
                raise InvalidArgumentError(self, argument, path, "a CSV file in UTF-8", because) from error
            with io.StringIO(text, newline="") as file:
                reader = csv.DictReader(file, strict=True)
                lines = _lines(self, argument, path, each, reader)
                next(lines, None)
                names = reader.fieldnames or ()
                if wrong := [name for name in names if not name.strip() or [*names].count(name) > 1]:
                    unnamed = "a column without a name, as pandas writes row numbers unless index is False"
                    what = f"several columns '{wrong[0]}'" if wrong[0].strip() else unnamed
                    because = f"'{each}' has {what}"
                    raise InvalidArgumentError(self, argument, path, "a table of columns with names", because)
                for cells in lines:
                    if any(cells.get(None) or ()):  # pyright: ignore[reportArgumentType, reportCallIssue]
                        because = f"line {reader.line_num} of '{each}' has more cells than there are columns"
                        raise InvalidArgumentError(self, argument, path, "a table with a cell for each column", because)
                    row = _Row(each, reader.line_num, each.stem, cells)
                    rows.append(row if self.client is None else replace(row, client=row.cell(self, self.client)))
            if len(rows) == before:
                raise InvalidArgumentError(self, argument, path, allowed, f"'{each}' has none")
        if not rows:
            raise InvalidArgumentError(self, argument, path, allowed)
        return rows


def _lines(owner: CsvFile, argument: str, path: str, file: Path, reader: csv.DictReader) -> Iterator[dict[str, str]]:
    """The names of the columns, as a row of their own, and then the rows of a file.

    Refuses a quote that is not closed in its line, which would swallow rows without a word.
    """
    cells: dict[str, str] | None = {}
    while cells is not None:
        before = reader.line_num
        try:
            cells = next(reader, None) if before else {name: name for name in reader.fieldnames or ()}
            is_closed = cells is None or reader.line_num <= before + 1 or not any(map(_has_break, cells.values()))
        except csv.Error:  # at the end of the file, or after 128 KiB
            is_closed = False
        if not is_closed:
            because = f"a quote in or after line {before + 1} of '{file}' is not closed in its line"
            raise InvalidArgumentError(owner, argument, path, "a CSV file with a row in each line", because)
        if cells is not None:
            yield cells


def _has_break(cell: Any) -> bool:
    return isinstance(cell, str) and ("\n" in cell or "\r" in cell)


@dataclass
class _Row:
    """A row of a table, and where it is."""

    path: Path
    line: int
    client: str
    cells: dict[str, str]

    def cell(self, owner: CsvFile, column: str) -> str:
        """The text in a column; refuses none."""
        text = (self.cells.get(column) or "").strip()
        if text and (text.casefold() not in _MISSING or text in (owner.classes or ())):
            return text
        allowed, found = "a table with a value in every cell", f"'{text}'" if text else "nothing"
        because = f"line {self.line} of '{self.path}' has {found} in the column '{column}'"
        if column not in self.cells:
            allowed = f"a table with a column '{column}'"
            because = f"those of '{self.path}' are {', '.join(filter(None, self.cells))}"
        raise InvalidArgumentError(owner, "path", owner.path, allowed, because)

    def number(self, owner: CsvFile, column: str) -> float:
        """The number in a column; refuses others."""
        text = self.cell(owner, column)
        try:
            number = _number(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            because = f"line {self.line} of '{self.path}' has '{text}' in the column '{column}'"
            allowed = "a table of numbers, beside the columns of targets and clients"
            raise InvalidArgumentError(owner, "path", owner.path, allowed, because)
        return number


def _values(texts: Sequence[str]) -> Tensor | None:
    """Targets as numbers, float32, shape (n,); None if they are classes: integers, or no numbers."""
    if are_integers(texts):
        return None
    try:
        return torch.tensor([_number(text) for text in texts])
    except ValueError:
        return None


def _number(text: str) -> float:
    if "_" in text:
        raise ValueError("Python takes 1_0 for 10")
    return float(text)
