"""A run's folder that a stranger made: whatever its files say, a report is written that shows it, or refused."""

import re

import pytest
from helpers.reports import csv_rows
from lightning.fabric.utilities.exceptions import MisconfigurationException
from markdown_it import MarkdownIt

from fedmoe_pl.logs.summary import write_csv
from fedmoe_pl.report.latex import in_latex
from fedmoe_pl.report.report import report
from fedmoe_pl.report.runs import find_runs
from fedmoe_pl.report.search import divided
from fedmoe_pl.report.tables import Table, in_markdown

RECORDS = {
    "no JSON": "[",
    "a list": "[]",
    "a text": '"text"',
    "one that is deep": "[" * 10**5,
    "one that is too deep": '{"a": ' + "[" * 60 + "]" * 60 + "}",
    "a number of many digits": f'{{"a": {"9" * 5000}}}',
    "half of a character": '{"a": "\\ud800"}',
    "a part that is none": '{"federation": 1}',
    "phases that are none": '{"federation": {"phases": [1]}}',
    "a phase without a name": '{"federation": {"phases": [{"rounds": 1}]}}',
    "an algorithm that is none": '{"federation": {"phases": [{"name": "a", "algorithm": "b"}]}}',
    "a seed that is a text": '{"a": NaN, "seed_everything": "x"}',
    "a seed that is a list": '{"seed_everything": [1]}',
    "data that are none": '{"data": 3}',
    "bytes": b"\xff\xfe\0",
}
CELLS = ['{"paper": [1]}', '{"values": 3}', '{"paper": [{"metric": "a", "table": "b", "cells": {"c": [1, "x"]}}]}']


def field(column, value):
    """A change of a field in the first row of a table."""

    def change(text):
        header, line, *lines = text.splitlines()
        fields = line.split(",")
        fields[header.split(",").index(column)] = value
        return "\n".join([header, ",".join(fields), *lines, ""])

    return change


def with_column(name):
    """A change that adds a column to a table."""

    def change(text):
        header, *lines = text.splitlines()
        return "\n".join([f'{header},"{name}"', *(f"{line}," for line in lines), ""])

    return change


DAMAGED = {  # a file of a run, and what it has in place of what the run wrote
    **{kind: ("record.json", content) for kind, content in RECORDS.items()},
    **{f"a cell {number}": ("../cell.json", content) for number, content in enumerate(CELLS)},
    "cut off in half": ("rounds.csv", lambda text: text[: len(text) // 2]),
    "without its last row": ("rounds.csv", lambda text: text[: text[:-1].rfind("\n") + 1]),
    "empty": ("rounds.csv", ""),
    "with a word in place of a number": ("rounds.csv", lambda text: text.replace(",0.", ",zero", 1)),
    "a round that is infinite": ("summary.csv", field("round", "inf")),
    "a client that is no integer": ("clients.csv", field("client", "1e9")),
    "a negative client": ("partition.csv", field("client", "-1")),
    "a client of many digits": ("gate_weights.csv", field("client", "9" * 20)),
    "a word in place of a mean": ("rounds.csv", field("global_test_mean", "high")),
    "a field that is very long": ("clients.csv", field("method", "a" * 200_000)),
    "a column that is there twice": ("summary.csv", with_column("method")),
    "a column with a line break": ("summary.csv", with_column("a\nb_worst_tenth")),
    "a column that is not printable": ("summary.csv", with_column("a\u2028b")),
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_a_file_that_no_run_writes_is_refused_in_one_sentence(kind, copied):
    (name, content), folder = DAMAGED[kind], copied("run")
    path = (folder / name).resolve()
    content = content(path.read_text()) if callable(content) else content
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    reason = r"its first line has not the names of its columns\.$" if "a column" in kind else ".+"
    with pytest.raises(MisconfigurationException, match=rf"^report: RUN has the file '{path}', which is.*: {reason}"):
        find_runs([folder])


@pytest.mark.parametrize(
    "text", ["trial\n", "trial,state,best,round,m\n../..,x,best,1,0.5\n", "trial,state,best,round,m\na,b,c,d,e\n"]
)
def test_trials_that_no_search_writes_are_refused(text, tmp_path):
    (tmp_path / "trials.csv").write_text(text)
    with pytest.raises(MisconfigurationException, match=r"trials\.csv', which is damaged: .+\.$"):
        divided([tmp_path])


NAMES = [
    "[a](javascript:alert(1))",
    "<script>alert(1)</script>",
    "<!-- end of tiny -->",
    "![a](b) `c` **d** _e_ ~~f~~ $g$ &lt;",
    "a|b\\|c\\",
    "# a\n\n## b",
    "> a",
    "\\input{/etc/passwd}",
    "[2cm] a",
    "* a % b",
    "a\r\nb\u2028c\x00",
    r"\1 \g<0>",
]


def shown(text):
    """As a reader sees a text, of which line breaks are spaces."""
    return " ".join("".join(each if each.isprintable() else " " for each in text).split())


@pytest.mark.parametrize("name", NAMES)
def test_markdown_shows_a_name_as_it_is(name):
    """Read by a parser of another library."""
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    for page in (Table(["method"], [[name]]).markdown(), in_markdown(name), f"* {in_markdown(name)}"):
        tokens = parser.parse(page)
        inlines = [child for token in tokens for child in token.children or ()]
        assert {child.type for child in inlines} <= {"text", "text_special"}
        assert not {token.type for token in tokens} & {"html_block", "heading_open", "blockquote_open", "code_block"}
        assert shown("".join(child.content for child in inlines)).removeprefix("method") == shown(name)


@pytest.mark.parametrize("name", NAMES)
def test_latex_has_no_command_of_a_name(name):
    """Nothing is left of a name but escaped signs: no line break, no command, no argument of the row before."""
    text = in_latex(name)
    assert text.isprintable() and "%" not in text.replace(r"\%", "")
    known = r"\\(textbackslash|textasciitilde|textasciicircum|symbol\{34\})(\{\})?|\\[&%$#_{}]|\$[<>]\$|\{[][*]\}"
    assert not re.search(r"[\\&%$#_^~*\[\]]", re.sub(known, "", text))


def test_a_report_of_hostile_names_shows_them(copied, written, tmp_path):
    """Each is the name of a method, the first also that of a client and of the baseline."""
    folder = copied("run", change=lambda config: config["federation"].pop("phases"))
    for file in ("rounds", "summary", "clients", "gate_weights"):
        rows = csv_rows(folder / f"{file}.csv")
        own = [row for row in rows if row["method"] == "PFL-MF"]
        named = {"name": NAMES[0]} if file == "clients" else {}
        write_csv(folder / f"{file}.csv", [row | named | {"method": name} for name in NAMES for row in own])
    parsed, markdown = written(folder, "--latex", tmp_path / "a.tex", "--baseline", NAMES[0])
    assert [shown(row[0]) for row in parsed.tables["methods"][2:]] == [*map(shown, NAMES)]
    assert not parsed.unclosed and not any(address.startswith("javascript:") for address in parsed.addresses)
    table = re.sub(r"\\mbox\{(.*?)\}", r"\1", (tmp_path / "a.tex").read_text())
    for name in NAMES:
        assert f"\n{in_latex(name)} & " in table and in_markdown(name) in markdown


@pytest.mark.slow
def test_pictures_of_hostile_names_are_drawn(copied, tmp_path):
    name = "_A $x_$ \\frac{ <script>*" * 20
    folder = copied("run", change=lambda config: config["federation"]["phases"][3].update(name=name))
    for file in ("rounds", "summary", "clients", "gate_weights"):
        text = (folder / f"{file}.csv").read_text()
        (folder / f"{file}.csv").write_text(text.replace("\nPFL-MF,", f"\n{name},"))
    report([str(folder), "--output", str(tmp_path / "report.html")])
    assert "<script" not in (tmp_path / "report.html").read_text()
    assert [path for path in (tmp_path / "report_pictures").glob("gate_*.pdf")]
