"""Files that are read back, and pictures that are not drawn."""

import csv
from html.parser import HTMLParser
from pathlib import Path

from matplotlib.figure import Figure

from fedmoe_pl.checkpoints.phase_state import WAYS

_WITHOUT_END = {"meta", "link", "br", "img", "hr", "input", "wbr"}


def csv_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def leave_pictures_blank(monkeypatch):
    """Lets figures be made, logged and written, but not drawn, which is most of the time that they take."""
    monkeypatch.setattr(Figure, "draw", lambda self, renderer: None)
    monkeypatch.setattr(Figure, "draw_without_rendering", lambda self: None)


def cost_rows(method, values, metric="reweighted_test", spent=(1, 1, 1), before=(0, 0, 0, 0), every=1, **more):
    """Rows of evaluated rounds with means of a metric and all costs so far.

    ``spent`` has the parameters and bytes that are sent each way between two evaluations, and the operations;
    ``before`` has the rounds, parameters, bytes and operations before the phase.
    """
    names = ("rounds_before", "parameters_before", "bytes_before", "flops_before")
    for number, value in enumerate(values, 1):
        costs = dict(zip(names, before, strict=True)) | {"flops": spent[2] * number}
        for name, each in zip(("parameters", "bytes"), spent, strict=False):
            costs |= {f"{name}_{way}": each * number for way in WAYS}
        row = {"method": method, "evaluation_point": "any", "round": every * number, f"{metric}_mean": value}
        yield {**row, **costs, **more}


class Page(HTMLParser):
    """What is in an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: dict[str, list[list[str]]] = {}  # by its class or its number
        self.addresses: list[str] = []  # that a browser might load or follow
        self.ids: list[str] = []
        self.unclosed: list[str] = []
        self.text = ""  # outside of tables
        self._table: list[list[str]] | None = None
        self._in_cell = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        if tag not in _WITHOUT_END:
            self.unclosed.append(tag)
        self._note(dict(attrs))
        if tag == "table":
            self._table = self.tables.setdefault(f"{dict(attrs).get('class', len(self.tables))}", [])
        elif tag == "tr" and self._table is not None:
            self._table.append([])
        elif tag in ("td", "th") and self._table is not None:
            self._table[-1].append("")
            self._in_cell = True

    def handle_startendtag(self, tag, attrs):
        self._note(dict(attrs))

    def _note(self, attributes):
        self.addresses += [attributes[name] for name in ("src", "href", "xlink:href") if name in attributes]
        self.ids += [attributes["id"]] if "id" in attributes else []

    def handle_endtag(self, tag):
        assert self.unclosed.pop() == tag
        if tag == "table":
            self._table = None
        elif tag in ("td", "th"):
            self._in_cell = False

    def handle_data(self, data):
        if self._in_cell:
            self._table[-1][-1] += data.strip()
        else:
            self.text += data


def markdown_tables(text: str) -> list[list[list[str]]]:
    """The tables of a Markdown file, each as rows of cells; the first row is the header."""
    blocks = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in block if "---" not in line]
        for block in blocks
    ]
