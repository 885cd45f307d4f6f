"""Checks and measures on a GPU, step by step, and writes one page of Markdown; ``benchmarks/gpu.sh`` starts it.

    benchmarks/gpu.sh page.md
    benchmarks/gpu.sh --only cifar10 --cifar10 data --minutes 60 page.md
    benchmarks/gpu.sh --accelerator cpu --short page.md

The steps are the machine, the tests that need a GPU, rounds of FedAvg, the personalization of PFL-MoE, and PFL-MoE on
CIFAR-10 with the paper's 1000 rounds. Each command runs in a process of its own with a time limit. Failures are shown
on the page, and the next step follows. The exit status is 1 if anything failed. Every step but the last ends within ten
minutes. The last one needs torchvision's folder of CIFAR-10. It ends after ``--minutes``; the same command goes on.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = "configs/pfl_moe_cifar10_lenet5.yaml"
SHORT_CONFIG = "configs/quickstart.yaml"  # the same methods on data that need no download
INTERRUPTED = 130  # exit status of the command line after Ctrl-C
CHECKPOINT = "checkpoints/last.ckpt"  # in a run's folder
FINISHED = "finished"  # a file in the folder of a run that has nothing left to train
GRACE = 30.0  # seconds from SIGINT to SIGKILL
TAIL = 25  # lines of a failed command that the page shows


@dataclass(frozen=True)
class Outcome:
    """What became of a command.

    Attributes:
        seconds: how long it ran.
        output: what it printed.
        status: its exit status.
        limit: the limit that stopped it, in seconds; None if it ended by itself.
    """

    seconds: float
    output: str
    status: int
    limit: float | None

    @property
    def problem(self) -> str:
        """What went wrong; empty if nothing did."""
        if self.limit is not None:
            return f"stopped after {self.limit:.0f} s"
        return f"exit status {self.status} after {self.seconds:.0f} s" if self.status else ""


class Page:
    """The page, which grows line by line, so that nothing is lost if the script is killed.

    Args:
        path: the file, which is replaced.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.failed: list[str] = []
        self.tails: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")

    def write(self, *lines: str) -> None:
        """Adds lines."""
        with self.path.open("a", encoding="utf-8") as file:
            file.write("\n".join([*lines, ""]))

    def section(self, title: str, commands: Sequence[Sequence[str]], *header: str) -> None:
        """Begins a section: its title, its commands and the head of its table."""
        print(title, flush=True)
        self.write("", f"## {title}", "", "```bash", *(shown(command) for command in commands), "```", "")
        self.row(*header)
        self.row(*["---"] * len(header))

    def row(self, *cells: object) -> None:
        """Adds a row of a table."""
        self.write(f"| {' | '.join(str(cell) for cell in cells)} |")

    def fail(self, what: str, outcome: Outcome, problem: str | None = None) -> str:
        """Notes a failure, of which the section's end shows the output; returns it in words."""
        problem = problem or outcome.problem
        self.failed.append(f"{what} ({problem})")
        lines = [line[:300] for line in outcome.output.rstrip().splitlines()[-TAIL:]]
        self.tails += ["", f"**Failed: {what}, {problem}.** The end of its output:", "", "~~~~text", *lines, "~~~~"]
        return problem

    def end_section(self) -> None:
        """Shows what the section's failed commands printed."""
        self.write(*self.tails)
        self.tails = []


def shown(arguments: Sequence[str]) -> str:
    """A command as the user would type it in the checkout."""
    return f"python {shlex.join(arguments)}"


def run(arguments: Sequence[str], limit: float) -> Outcome:
    """Runs Python in the checkout. After ``limit`` seconds it gets a SIGINT, and later its group a SIGKILL."""
    start = time.monotonic()
    print(f"  {shown(arguments)}", flush=True)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        command = [sys.executable, *arguments]
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        stopped_after = None
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            stopped_after = limit
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        outcome = Outcome(time.monotonic() - start, output.read(), process.returncode, stopped_after)
    print(f"  {outcome.seconds:.0f} s {outcome.problem}", flush=True)
    return outcome


def machine(page: Page, options: argparse.Namespace) -> None:
    """GPU, driver, versions, date and revision."""
    command = ["benchmarks/machine.py", "--accelerator", options.accelerator]
    page.section("Machine", [command], "what", "value")
    outcome = run(command, 300 * options.limit_factor)
    rows = [] if outcome.problem else re.findall(r"^(.+?): (.*)$", outcome.output, re.MULTILINE)
    for cells in rows:
        page.row(*cells)
    if not rows:
        page.fail("machine", outcome, outcome.problem or "no result")


def tests(page: Page, options: argparse.Namespace) -> None:
    """The tests that need a GPU."""
    command = ["-m", "pytest", "-m", "gpu", "-q", "--tb=short", "--continue-on-collection-errors"]
    page.section("Tests", [command], "passed", "failed", "skipped", "errors", "seconds")
    outcome = run(command, 500 * options.limit_factor)
    summary = next((line for line in reversed(outcome.output.splitlines()) if re.search(r" in [\d.]+s", line)), "")
    counts = {name.rstrip("s"): int(number) for number, name in re.findall(r"(\d+) (\w+)", summary)}
    page.row(*(counts.get(name, 0) for name in ("passed", "failed", "skipped", "error")), f"{outcome.seconds:.0f}")
    if outcome.problem or (options.accelerator == "gpu" and not counts.get("passed")):
        page.fail("tests", outcome, outcome.problem or "no test ran")


def rounds(page: Page, options: argparse.Namespace) -> None:
    """Rounds of FedAvg against the bare loop, in order of what they need, until the step's time is over."""
    # the expert, clients, samples of a client, and rounds, of which the first is not counted
    sizes = [("LeNet5", 10, 500, 4), ("LeNet5", 100, 500, 3), ("VGG16", 10, 500, 3), ("VGG16", 100, 50, 2)]
    if options.short:
        sizes = [("LeNet5", 2, 20, 2)]
    commands = []
    for expert, clients, samples, number in sizes:
        common = ["--expert", expert, "--no-dropout"] if expert == "VGG16" else ["--expert", expert]
        common += ["--clients", str(clients), "--samples", str(samples), "--batch-size", "10", "--epochs", "1"]
        common += ["--rounds", str(number), "--repeats", "1", "--accelerator", options.accelerator]
        for precision in ("32-true", "bf16-mixed"):
            for backend in ("TrainerBackend", "StackedBackend"):
                cells = expert, clients, precision, backend
                varied = ["--precision", precision, "--backends", backend]
                commands.append((cells, ["benchmarks/round.py", *common, *varied]))
    header = "model", "clients", "precision", "backend", "seconds a round", "bare loop", "times as fast", "goal"
    page.section("Rounds", [command for _, command in commands], *header, "peak memory, MiB", "of the bare loop")
    end = time.monotonic() + 540 * options.limit_factor
    for cells, command in commands:
        limit = min(120 * options.limit_factor, end - time.monotonic())
        name = " ".join(str(cell) for cell in cells)
        outcome = run(command, limit) if limit > 0 else Outcome(0, "", 1, 0)
        found = re.findall(r"^(\w+): median ([\d.]+) s, .*peak memory (\d+) MiB$", outcome.output, re.MULTILINE)
        medians = {backend: (float(seconds), memory) for backend, seconds, memory in found}
        problem = page.fail(name, outcome) if outcome.problem else ""
        goal = {10: "10", 100: "50"}.get(cells[1], "-")
        if len(medians) == 2:
            (bare, bare_memory), (seconds, memory) = medians["bare"], medians[cells[3]]
            row = f"{seconds:.3f}", f"{bare:.3f}", f"{bare / max(seconds, 1e-3):.2f}", goal, memory, bare_memory
            page.row(*cells, *row[:2], f"{row[2]} ({problem})" if problem else row[2], *row[3:])
        else:
            page.row(*cells, problem or page.fail(name, outcome, "no result"), "-", "-", goal, "-", "-")


def personalization(page: Page, options: argparse.Namespace) -> None:
    """PFL-FB and the gates of PFL-MF and PFL-MFE against the bare loop."""
    sizes = {"clients": 2, "epochs": 2, "bare-clients": 1} if options.short else {"bare-clients": 6}
    command = ["benchmarks/personalization.py", "--accelerator", options.accelerator, "--devices", "1"]
    command += [word for name, number in sizes.items() for word in (f"--{name}", str(number))]
    header = "phase", "bare loop, s", "federation, s", "times as fast"
    page.section("Personalization of PFL-MoE", [command], *header)
    outcome = run(command, 500 * options.limit_factor)
    line = r"^(\S+) +bare +([\d.]+) s +federation +([\d.]+) s +ratio +([\d.]+)$"
    rows = re.findall(line, outcome.output, re.MULTILINE)
    for cells in rows:
        page.row(*cells)
    for peak in re.findall(r"^peak memory of .*$", outcome.output, re.MULTILINE):
        page.write("", f"{peak}.")
    if outcome.problem or not rows:
        page.fail("personalization", outcome, outcome.problem or "no result")


def cifar10(page: Page, options: argparse.Namespace) -> None:
    """PFL-MoE on CIFAR-10, from the last checkpoint of a run that is not finished, if there is one."""
    config = options.config or (SHORT_CONFIG if options.short else CONFIG)
    name = f"{Path(config).stem}_short" if options.short else Path(config).stem
    runs = Path(options.runs).absolute() / name
    command = ["cli.py", "fit", "--config", config, f"--trainer.accelerator={options.accelerator}"]
    command += ["--trainer.devices=1", f"--federation.default_root_dir={runs.parent}", f"--federation.name={name}"]
    command.append("--federation.enable_progress_bar=false")
    if not options.short:
        command += [f"--data.init_args.root={os.path.abspath(options.cifar10 or 'FOLDER')}"]
        command.append("--data.init_args.download=false")
    old = {*runs.glob("version_*")}
    unfinished = [folder for folder in old if (folder / CHECKPOINT).exists() and not (folder / FINISHED).exists()]
    continued = max(unfinished, key=lambda folder: os.path.getmtime(folder / CHECKPOINT), default=None)
    command += [f"--ckpt_path={continued / CHECKPOINT}"] if continued else []
    page.section(f"PFL-MoE, {config}", [command], "method", "last round", "reweighted test, %", "global test, %")
    if not (options.short or options.cifar10):
        page.row("left out", "-", "-", "-")
        page.write("", "It needs the folder in which torchvision has put CIFAR-10, with `cifar-10-batches-py` in it:")
        page.write("", "```bash", "benchmarks/gpu.sh --only cifar10 --cifar10 FOLDER --minutes 60 PAGE", "```")
        return
    outcome = run(command, 60 * options.minutes)
    folder = continued or next(iter({*runs.glob("version_*")} - old), None)  # None if the command failed at once
    rows = last_rows(folder / "rounds.csv") if folder else []
    for row in rows:
        percents = (f"{100 * float(row[metric]):.2f}" for metric in ("reweighted_test_mean", "global_test_mean"))
        page.row(row["method"], row["round"], *percents)
    if outcome.limit is not None and outcome.status == INTERRUPTED:
        hint = "No round had ended, so there is no checkpoint; give it more `--minutes`."
        if folder and (folder / CHECKPOINT).exists():
            hint = f"The same command of `benchmarks/gpu.sh` goes on from the last checkpoint in `{folder}`."
        page.write("", f"Stopped after {options.minutes:g} minutes, as asked.", hint)
    elif outcome.problem or not (folder and rows):
        page.fail("cifar10", outcome, outcome.problem or "no result")
    else:
        (folder / FINISHED).touch()
        page.write("", f"Finished; this part took {outcome.seconds:.0f} s.")


def last_rows(file: Path) -> list[dict[str, str]]:
    """The last row of each method in a run's ``rounds.csv``; none if there is no such file."""
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    return [*{row["method"]: row for row in csv.DictReader(lines)}.values()]


STEPS: dict[str, Callable[[Page, argparse.Namespace], None]] = {
    "machine": machine,
    "tests": tests,
    "rounds": rounds,
    "personalization": personalization,
    "cifar10": cifar10,
}


def main() -> None:
    """Reads the options and runs the steps."""
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("page", nargs="?", default="gpu.md", help="the file to write")
    parser.add_argument("--only", action="append", choices=[*STEPS], help="a step to run; all if not given")
    parser.add_argument("--accelerator", choices=["cpu", "gpu"], default="gpu")
    parser.add_argument("--short", action="store_true", help="the smallest sizes, to try the script out")
    parser.add_argument("--cifar10", default=os.environ.get("CIFAR10"), help="torchvision's folder; default $CIFAR10")
    parser.add_argument("--minutes", type=float, default=9, help="limit of the step cifar10")
    parser.add_argument("--config", help=f"configuration of the step cifar10; default {CONFIG}")
    parser.add_argument("--runs", default="runs/gpu", help="folder of the runs of the step cifar10")
    parser.add_argument("--limit-factor", type=float, default=1, help="multiplies all other time limits")
    options = parser.parse_args()
    # commands inherit these; a shell's background job ignores Ctrl-C, and a killed script must end what it started
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    page = Page(Path(options.page))
    called = f"benchmarks/gpu.sh {shlex.join(sys.argv[1:])}".rstrip()
    page.write(f"# fedmoe_pl on a {options.accelerator.upper()}", "", "```bash", called, "```")
    for name in options.only or STEPS:
        STEPS[name](page, options)
        page.end_section()
    page.write("", f"Failed: {'; '.join(page.failed)}." if page.failed else "Everything ran.")
    print(f"wrote {page.path}", flush=True)
    sys.exit(1 if page.failed else 0)


if __name__ == "__main__":
    main()
