"""The command ``fedmoe report``."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Sequence
from datetime import date
from pathlib import Path

from jsonargparse import ArgumentParser

from fedmoe_pl.callbacks.figures import styles
from fedmoe_pl.catalogue import parser_of
from fedmoe_pl.checkpoints.files import write_file
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.evaluation.results import ACCURACIES
from fedmoe_pl.report.latex import latex
from fedmoe_pl.report.markdown import markdown, with_section
from fedmoe_pl.report.page import page, section_of
from fedmoe_pl.report.runs import RunFiles, find_runs
from fedmoe_pl.report.search import divided
from fedmoe_pl.report.settings import conditions, flat_name, left_out_notes, settings_of
from fedmoe_pl.report.tables import Choices, condition_of, in_markdown


def report_parser() -> ArgumentParser:
    """The parser of ``fedmoe report``."""
    parser = parser_of("report")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, or of several")
    parser.add_argument(
        "--output", help="the page, by default report.html; its pictures are PDF files in a folder beside it"
    )
    parser.add_argument(
        "--markdown", help="the Markdown file, by default beside the page; alone, it is all that is made"
    )
    parser.add_argument("--latex", help="also write the tables as LaTeX, into this file")
    parser.add_argument("--section", help="write only this section of the Markdown file, between its two marks")
    parser.add_argument("--title", default="Results", help="the page's title")
    parser.add_argument("--baseline", help="method with which the others are compared; by default, the grid's")
    parser.add_argument("--metric", help=f"accuracy, or other metric, that is compared: {', '.join(ACCURACIES)}")
    parser.add_argument("--target", type=float, help="value of it to reach; by default, what half of the methods reach")
    parser.add_argument(
        "--split", default="", metavar="KEY,KEY", help="keys whose values have tables of their own, such as model"
    )
    parser.add_argument("--rounds", default="", metavar="N,N", help="rounds after which a table has the accuracy")
    return parser


def report(arguments: Sequence[str]) -> list[Path]:
    """Runs ``fedmoe report`` with the arguments after it; returns the files that it wrote."""
    options = report_parser().parse_args([*arguments])
    if Path(options.output or "").suffix not in ("", ".html", ".htm"):
        raise InvalidArgumentError("report", "--output", options.output, "a page, such as report.html")
    choices = Choices(options.metric, options.target, options.baseline, _rounds(options.rounds))
    tuned, folders = divided(map(Path, options.runs))
    runs = find_runs(folders)
    _check(choices, runs)
    settings, left_out = settings_of(runs)
    split = [flat_name(key) for key in options.split.split(",") if key]
    known = {name for setting in settings for name in setting.values}
    if unknown := [key for key in split if key not in known and not any(name.startswith(f"{key}/") for name in known)]:
        allowed = "keys of the runs' configurations, such as model or data.init_args.partitioner.init_args.alpha"
        raise InvalidArgumentError("report", "--split", unknown[0], allowed)
    grouped = [condition_of(name, group, choices) for name, group in conditions(settings, split).items()]
    command = shlex.join(["fedmoe", "report", *arguments])
    files = []
    if options.output or not options.markdown:
        files.append(Path(options.output or "report.html"))
        of_methods = styles(method.label for condition in grouped for method in condition.methods)
        sections = [section_of(condition, of_methods) for condition in grouped]
        pictures = files[0].with_name(f"{files[0].stem}_pictures")
        facts = {
            "title": options.title,
            "origin": origin(runs),
            "command": command,
            "folder": pictures.name,
            "trials": tuned,
        }
        write_file(files[0], page(sections, of_methods, facts | {"notes": _notes(runs, left_out)}))
        pictures.mkdir(parents=True, exist_ok=True)
        for drawn in (drawn for section in sections for block in section.blocks for drawn in block.pictures):
            (pictures / f"{drawn.name}.pdf").write_bytes(drawn.pdf)
    files.append(Path(options.markdown or files[0].with_suffix(".md")))
    of_trials = "".join(f"### {in_markdown(each.title)}\n\n{each.table.markdown(each.best)}\n\n" for each in tuned)
    text = f"{of_trials}{markdown(grouped)}\n\n{origin(runs)}\n\n```bash\n{command}\n```\n"
    if options.section:
        before = files[-1].read_text(encoding="utf-8") if files[-1].is_file() else ""
        text = with_section(before, options.section, text)
    write_file(files[-1], text)
    if options.latex:
        files.append(Path(options.latex))
        write_file(files[-1], "\n".join(map(latex, grouped)))
    print(f"Report: {', '.join(str(file.absolute()) for file in files)}")
    return files


def _rounds(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")] if text else []
    if not all(part.isdecimal() for part in parts):
        raise InvalidArgumentError("report", "--rounds", text, "rounds, such as 5,10,25")
    return [int(part) for part in parts]


def _check(choices: Choices, runs: Sequence[RunFiles]) -> None:
    """Refuses a metric or a method that no run has, in whose place the report would show another one, or none."""
    known = {
        "metric": dict.fromkeys(name for run in runs for name in run.metrics),
        "baseline": dict.fromkeys(method for run in runs for method in run.methods),
    }
    for name, names in known.items():
        if (chosen := getattr(choices, name)) is not None and chosen not in names:
            raise InvalidArgumentError("report", f"--{name}", chosen, f"one that the runs have: {', '.join(names)}")
    evaluated = {int(row["round"]) for run in runs for row in run.rounds}
    if choices.rounds and not {*choices.rounds} & evaluated:
        allowed = f"one that was evaluated at least, of which the last is {max(evaluated, default='none')}"
        raise InvalidArgumentError("report", "--rounds", choices.rounds, allowed)
    of_accuracy = (
        choices.metric in ACCURACIES if choices.metric else any(name in ACCURACIES for name in known["metric"])
    )
    if choices.target is not None and of_accuracy and not 0 < choices.target <= 1:
        raise InvalidArgumentError("report", "--target", choices.target, "a fraction above 0 and at most 1")


def _notes(runs: Sequence[RunFiles], left_out: Sequence[RunFiles]) -> list[str]:
    unfinished = ", ".join(run.name for run in runs if not run.is_finished)
    notes = [f"Not finished, with the results so far: {unfinished}."] if unfinished else []
    return notes + left_out_notes(left_out)


def origin(runs: Sequence[RunFiles]) -> str:
    """When the runs wrote their newest results, and when and where the report was written."""
    days = sorted(run.written[:10] for run in runs)
    of_runs = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
    return f"Runs of {of_runs}; report of {date.today()}, {_machine()}."


def _machine() -> str:
    """This machine's processor and its number of cores."""
    name = platform.processor() or platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else name}, {os.cpu_count()} cores"
