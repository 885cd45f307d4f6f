"""benchmarks/gpu.sh, which measures on a GPU, in a shortened form on the CPU."""

import importlib.util
import os
import subprocess
import sys

import pytest
from helpers.configurations import REPOSITORY

_spec = importlib.util.spec_from_file_location("gpu_page", REPOSITORY / "benchmarks/gpu_page.py")
gpu_page = importlib.util.module_from_spec(_spec)
sys.modules["gpu_page"] = gpu_page  # where its dataclass looks for its module
_spec.loader.exec_module(gpu_page)

PHASES = ["Local", "FedAvg", "PFL-FB", "equal weights", "PFL-MF", "PFL-MFE", "label prior"]


def start(tmp_path, *arguments) -> tuple[int, str]:
    """Runs the script on the CPU with the smallest sizes; its exit status and its page."""
    page = tmp_path / "page.md"
    script = [str(REPOSITORY / "benchmarks/gpu.sh"), "--accelerator", "cpu", "--short", "--runs", "runs", *arguments]
    environment = {**os.environ, "PYTHON": sys.executable}
    done = subprocess.run([*script, "page.md"], cwd=tmp_path, env=environment, capture_output=True)
    return done.returncode, page.read_text()


def called(monkeypatch, tmp_path, *arguments) -> tuple[int, str]:
    """The same in this process."""
    page = tmp_path / "page.md"
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr(sys, "argv", ["gpu_page.py", "--runs", str(tmp_path / "runs"), *arguments, str(page)])
        patch.setattr(gpu_page.signal, "signal", lambda *_: None)
        gpu_page.main()
    return end.value.code, page.read_text()


def tables(page: str) -> dict[str, list[dict[str, str]]]:
    """The rows of each section's table, by title."""
    found = {}
    for section in page.split("\n## ")[1:]:
        rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
        header = [cell.strip() for cell in rows[0]]
        found[section.splitlines()[0]] = [dict(zip(header, row, strict=True)) for row in rows[2:]]
    return found


@pytest.mark.slow
def test_every_step_runs_on_a_cpu_and_has_its_table(tmp_path):
    status, page = start(tmp_path)
    found = tables(page)
    assert (status, page.splitlines()[-1]) == (0, "Everything ran."), page
    assert [*found] == [
        *("Machine", "Tests", "Rounds", "Personalization of PFL-MoE", "PFL-MoE, configs/quickstart.yaml")
    ]
    assert "| torch | " in page and "| date | 20" in page
    (tests,) = found["Tests"]
    assert tests["failed"] == tests["errors"] == "0" and int(tests["skipped"]) + int(tests["passed"]) >= 10
    for row in found["Rounds"]:
        ratio = float(row["bare loop"]) / float(row["seconds a round"])
        assert abs(float(row["times as fast"]) - ratio) < 0.1 * ratio + 0.01
    assert [row["phase"] for row in found["Personalization of PFL-MoE"]] == ["PFL-FB", "PFL-MF", "PFL-MFE", "all"]
    runs = found["PFL-MoE, configs/quickstart.yaml"]
    assert [row["method"] for row in runs] == PHASES
    assert all(50 < float(row[name]) <= 100 for row in runs for name in ("reweighted test, %", "global test, %"))
    assert page.count("```bash") == 6  # the script's own command, and those above the five tables


@pytest.mark.slow
def test_a_command_that_hangs_is_interrupted_and_its_output_is_kept():
    code = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
print('begun', flush=True)
time.sleep(600)
"""
    outcome = gpu_page.run(["-c", code], limit=2)
    assert outcome.problem == "stopped after 2 s"
    assert outcome.output.startswith("begun") and "KeyboardInterrupt" in outcome.output


MEDIANS = """\
bare: median 2.000 s, 1.900 CPU s; ratio 1.000, 1.000 in CPU seconds; peak memory 300 MiB
StackedBackend: median 0.100 s, 0.090 CPU s; ratio 0.050, 0.047 in CPU seconds; peak memory 900 MiB
"""


def test_rounds_have_a_row_each_whatever_becomes_of_the_others(monkeypatch, tmp_path):
    def run(command, limit):
        assert 0 < limit <= 120
        if "TrainerBackend" in command:
            return gpu_page.Outcome(3.0, "out of memory", 1, None)
        differs = "VGG16" in command
        return gpu_page.Outcome(3.0, MEDIANS + "the weights differ" * differs, int(differs), None)

    monkeypatch.setattr(gpu_page, "run", run)
    status, page = called(monkeypatch, tmp_path, "--only", "rounds")
    rows = tables(page)["Rounds"]
    assert status == 1 and len(rows) == 16
    for row in rows:
        assert row["goal"] == {"10": "10", "100": "50"}[row["clients"]]
        if row["backend"] == "TrainerBackend":
            assert (row["seconds a round"], row["times as fast"]) == ("exit status 1 after 3 s", "-")
            continue
        assert (row["seconds a round"], row["bare loop"], row["peak memory, MiB"]) == ("0.100", "2.000", "900")
        failed = " (exit status 1 after 3 s)" if row["model"] == "VGG16" else ""
        assert row["times as fast"] == "20.00" + failed
    assert page.count("**Failed: ") == 12
    assert page.count("out of memory") == 8
