"""The command ``fedmoe report``."""

from __future__ import annotations

import math
import os
import platform
import shlex
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.checkpoints.writing import replacing
from fedmoe_pl.evaluation.evaluation import METRICS
from fedmoe_pl.report.columns import Choices
from fedmoe_pl.report.markdown import markdown, with_section
from fedmoe_pl.report.page import page, written
from fedmoe_pl.report.runs import RunFiles, find_runs
from fedmoe_pl.report.sections import section_of
from fedmoe_pl.report.settings import conditions, settings_of
from fedmoe_pl.report.style import styles, write_pdfs
from fedmoe_pl.report.tables import Condition, condition_of

DESCRIPTION = "Writes the results of runs as one HTML page, as Markdown tables, and as pictures for a paper"


def report_parser() -> ArgumentParser:
    """The parser of ``fedmoe report``."""
    parser = ArgumentParser(prog="fedmoe report", description=DESCRIPTION, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("runs", nargs="*", metavar="RUN", help="folder of a run, or of several; at least one")
    parser.add_argument(
        "--output", help="the page, by default report.html; its pictures are PDF files in a folder beside it"
    )
    parser.add_argument(
        "--markdown", help="the Markdown file, by default beside the page; alone, it is all that is made"
    )
    parser.add_argument("--section", help="write only this section of the Markdown file, between its two marks")
    parser.add_argument("--title", default="Results", help="the page's title")
    parser.add_argument("--baseline", help="method with which the others are compared; by default, the grid's")
    parser.add_argument("--metric", help=f"accuracy, or other metric, that is compared: {', '.join(METRICS)}")
    parser.add_argument("--target", help="value of it to reach; by default, what half of the methods reach")
    parser.add_argument(
        "--split", default="", metavar="KEY,KEY", help="keys whose values have tables of their own, such as model"
    )
    parser.add_argument("--rounds", default="", metavar="N,N", help="rounds after which a table has the accuracy")
    return parser


def report(arguments: Sequence[str]) -> list[Path]:
    """Runs ``fedmoe report``.

    Args:
        arguments: the arguments of the command line after ``report``.

    Returns:
        The page and the Markdown file, or only the latter.

    Raises:
        ArgumentError: if an argument is unknown or missing.
        MisconfigurationException: if an argument's value is wrong, a folder is that of no run or has no results yet, or
            a file cannot be written.
    """
    options = report_parser().parse_args([*arguments])
    if not options.runs:
        raise MisconfigurationException("report: RUN is missing; it must be the folder of a run or of several.")
    choices = Choices(options.metric, _target(options.target), options.baseline, _rounds(options.rounds))
    if options.section and not options.markdown:
        raise MisconfigurationException("report: --section is set, but must be left out without --markdown.")
    runs = find_runs(map(Path, options.runs))
    _check(choices, runs)
    settings, left_out = settings_of(runs)
    split = [key.replace(".init_args.", "/").replace(".", "/") for key in options.split.split(",") if key]
    grouped = [condition_of(name, group) for name, group in conditions(settings, split).items()]
    facts = {
        "title": options.title,
        "origin": origin(runs),
        "command": shlex.join(["fedmoe", "report", *arguments]),
        "notes": _notes(runs, left_out),
    }
    files = []
    if options.output or not options.markdown:
        files.append(Path(options.output or "report.html"))
        _write_page(files[0], grouped, choices, facts)
    files.append(Path(options.markdown or files[0].with_suffix(".md")))
    text = markdown(grouped, choices, facts["origin"], facts["command"])
    _write(files[-1], with_section(_page(files[-1]), options.section, text) if options.section else text)
    print(f"Report: {', '.join(map(str, files))}")
    return files


def _write_page(path: Path, grouped: Sequence[Condition], choices: Choices, facts: dict[str, Any]) -> None:
    """Writes the page, and its pictures as PDF files."""
    of_methods = styles(method.label for condition in grouped for method in condition.methods)
    sections = [section_of(condition, of_methods, choices) for condition in grouped]
    pictures = path.with_name(f"{path.stem}_pictures")
    _write(path, page(sections, grouped, of_methods, {**facts, "folder": pictures.name}))
    write_pdfs(pictures, (drawn for section in sections for block in section.blocks for drawn in block.pictures))


def _target(text: str | None) -> float | None:
    try:
        value = None if text is None else float(text)
    except ValueError:
        value = math.nan
    if value is not None and not math.isfinite(value):
        raise MisconfigurationException(f"report: --target is {text}, but must be a number, such as 0.8.")
    return value


def _rounds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() and int(part) for part in parts):
        raise MisconfigurationException(f"report: --rounds is {text}, but must be rounds above 0, such as 5,10,25.")
    return [int(part) for part in parts]


def _check(choices: Choices, runs: Sequence[RunFiles]) -> None:
    known = list(dict.fromkeys(name for run in runs for name in run.metrics))
    if choices.metric is not None and choices.metric not in known:
        raise MisconfigurationException(
            f"report: --metric is '{choices.metric}', but must be one that the runs have: {', '.join(known)}."
        )
    is_accuracy = (choices.metric or (known or METRICS)[0]) in METRICS
    if choices.target is not None and is_accuracy and not 0 < choices.target <= 1:
        raise MisconfigurationException(
            f"report: --target is {choices.target:g}, but must be a fraction above 0 and at most 1, such as 0.8."
        )
    methods = dict.fromkeys(method for run in runs for method in run.methods)
    if choices.baseline is not None and choices.baseline not in methods:
        raise MisconfigurationException(
            f"report: --baseline is '{choices.baseline}', but must be one of the methods: {', '.join(methods)}."
        )


def _notes(runs: Sequence[RunFiles], left_out: Sequence[RunFiles]) -> list[str]:
    unfinished = [run.name for run in runs if not run.is_finished]
    notes = []
    if unfinished:
        notes.append(f"Not finished, with the results so far: {', '.join(unfinished)}.")
    if left_out:
        names = ", ".join(str(run.folder) for run in left_out)
        notes.append(f"Left out, because another run has the same configuration and seed: {names}.")
    return notes


def origin(runs: Sequence[RunFiles]) -> str:
    """When the runs wrote their newest results, and when and where the report was written."""
    days = sorted(written(run.folder)[:10] for run in runs)
    of_runs = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    return f"Runs of {of_runs}; report of {date.today()}, {machine()}."


def machine() -> str:
    """This machine's processor and its number of cores."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else name}, {os.cpu_count()} cores"


def _page(path: Path) -> str:
    if not path.is_file():
        raise MisconfigurationException(f"report: --markdown is '{path}', but must be a file that has the section.")
    return path.read_text(encoding="utf-8")


def _write(path: Path, text: str) -> None:
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
