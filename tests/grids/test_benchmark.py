"""The command: cells are run, skipped, continued and named when they fail; it ends with a table."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import yaml
from filelock import FileLock
from helpers.configurations import REPOSITORY
from helpers.grids import pretended_configured, pretended_fit, write_grid
from helpers.reports import csv_rows, markdown_tables

from fedmoe_pl.cli import main
from fedmoe_pl.cli.command_line import configured
from fedmoe_pl.cli.grid_files import read_grid
from fedmoe_pl.grids import processes
from fedmoe_pl.grids.cells import cut_run, finished_run, make_cells

PAPER = [
    {"table": "A 2026, Table 1", "metric": "reweighted_test", "cells": {"FedAvg": [60, 0.5]}},
    {"table": "B 2026", "where": {"alpha": 7}, "metric": "reweighted_test", "cells": {"Local": 99}},
]


@pytest.fixture(autouse=True)
def as_on_the_command_line(monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])
    monkeypatch.setattr("sys.path", [*sys.path])


def run(arguments) -> int:
    with pytest.raises(SystemExit) as end:
        main(["benchmark", *arguments])
    return end.value.code


@pytest.fixture
def pretend(monkeypatch, tmp_path):
    """Lets cells run a process that writes a run's files at once, and leaves out the checks."""

    def use(kind):
        monkeypatch.setattr("fedmoe_pl.cli.command_line.configured", pretended_configured)
        monkeypatch.setattr(processes, "_PROGRAM", pretended_fit(kind, tmp_path))

    return use


def test_a_grid_is_run_once_and_ends_with_a_table(pretend, tmp_path, capsys):
    pretend("ends")
    alpha = {"data.init_args.partitioner.init_args.alpha": [0.5, 7]}
    arguments = write_grid(tmp_path, values={**alpha, "seed_everything": [0, 1]}, baseline="Local", paper=PAPER)
    assert run([*arguments, "--parallel", "2"]) == 0
    out = capsys.readouterr().out
    assert "[1/4] alpha=0.5,seed_everything=0 starts\n" in out
    assert re.search(r"\[4/4\] alpha=7,seed_everything=1 is finished after 0:\d\d:\d\d\n", out)
    # by hand: 10 clients with 50, 51 ... 59 percent, and 0.1 points more with seed 1; FedAvg has 10 points more
    first, second = markdown_tables(out)
    assert first[0] == ["method", "reweighted test", "paper", "to Local", "global test", "to Local"]
    assert first[1] == ["Local", "54.55 ± 0.07", "-", "-", "50.05 ± 0.07", "-"]
    assert first[2] == ["FedAvg", "64.55 ± 0.07", "60.00 ± 0.50", "+10.00*", "60.05 ± 0.07", "+10.00"]
    assert [line[2] for line in second] == ["paper", "99.00", "60.00 ± 0.50", "-"]
    assert "### alpha 0.5" in out and "* Paper: A 2026, Table 1." in out and "* Paper: B 2026." in out
    cell = json.loads((tmp_path / "runs/alpha=7,seed_everything=1/cell.json").read_text())
    assert cell["values"] == {"data.init_args.partitioner.init_args.alpha": 7, "seed_everything": 1}
    assert cell["variant"] is None and cell["baseline"] == "Local"
    assert [each["cells"] for each in cell["paper"]] == [{"FedAvg": [60.0, 0.5]}, {"Local": [99.0, None]}]

    assert run(arguments) == 0
    again = capsys.readouterr().out
    assert "starts" not in again and again.count(" is finished: ") == 4
    assert markdown_tables(again) == [first, second]

    assert run([*arguments, "--methods", "[PFL-FT]"]) == 0
    out = capsys.readouterr().out
    assert "starts" not in out and [line[0] for line in markdown_tables(out)[0]] == ["method", "Local", "PFL-FT"]


def test_the_files_have_the_table(pretend, tmp_path):
    pretend("ends")
    seed = {"data.init_args.partition_seed": 7}
    arguments = write_grid(tmp_path, baseline="FedAvg", paper=PAPER[:1], variants={"A_1": {}}, overrides=seed)
    assert run(arguments) == 0
    rows = csv_rows(tmp_path / "runs/table.csv")
    assert [(row["method"], row["metric"]) for row in rows] == [
        (method, metric) for method in ("Local", "FedAvg", "PFL-FT") for metric in ("reweighted_test", "global_test")
    ]
    local = rows[0]
    assert float(local["mean"]) == pytest.approx(0.5455) and float(local["std"]) == pytest.approx(0.001 / 2**0.5)
    assert float(local["difference"]) == pytest.approx(-0.1) and local["pairs"] == "20"
    assert (local["variant"], local["seeds"], local["partition_seeds"]) == ("A_1", "0 1", "7 7")
    assert local["more_than_noise"] == "True" and local["paper_std"] == ""
    assert (
        (rows[2]["paper"], rows[2]["paper_std"]) == ("0.6", "0.005")
        and rows[2]["difference"] == ""
        and rows[1]["pairs"] == "2"
    )
    assert 0 < float(local["p"]) < 1e-4
    ((header, _, fedavg, _),) = markdown_tables((tmp_path / "runs/table.md").read_text())
    assert header == ["method", "reweighted test", "paper", "to FedAvg", "global test", "to FedAvg"]
    assert fedavg == ["FedAvg", "64.55 ± 0.07", "60.00 ± 0.50", "-", "60.05 ± 0.07", "-"]
    latex = (tmp_path / "runs/table.tex").read_text()
    assert r"method & ours & paper & $\Delta$ & accuracy \\" in latex
    assert r"FedAvg & $64.55_{\pm 0.07}$ & $60.00_{\pm 0.50}$ & \textemdash & $60.05_{\pm 0.07}$ \\" in latex
    assert r"\mbox{PFL-FT} & $\mathbf{74.55}_{\pm 0.07}$ & -- & $+10.00^{*}$ & $\mathbf{70.05}_{\pm 0.07}$ \\" in latex
    assert r"Local & $54.55_{\pm 0.07}$ & -- & $-10.00^{*}$ & $50.05_{\pm 0.07}$ \\" in latex
    assert r" & \multicolumn{3}{c}{reweighted test} & \multicolumn{1}{c}{\shortstack{global\\test}} \\" in latex
    assert r"\cmidrule(lr){2-4} \cmidrule(lr){5-5}" in latex and "X" + 4 * "r" + "}" in latex


def test_a_failed_cell_is_named_and_the_others_go_on(pretend, tmp_path, capsys):
    pretend("fails")
    assert run(write_grid(tmp_path)) == 1
    said = capsys.readouterr()
    path = tmp_path / "runs/seed_everything=0/stderr.log"
    assert re.search(
        rf"\[1/2\] seed_everything=0 failed after 0:\d\d:\d\d \(exit code 2\): fedmoe: it is broken. \[{path}\]",
        said.out,
    )
    assert "[2/2] seed_everything=1 is finished" in said.out and "One run" in said.out
    assert said.err == f"fedmoe: seed_everything=0 failed; see {path}\n"


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.few(1)
def test_a_signal_ends_all_and_the_same_command_continues(signum, pretend, tmp_path, capsys):
    pretend("hangs")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
    began = tmp_path / "runs/seed_everything=1/version_0/began"

    def send():
        while not (began.is_file() and began.stat().st_size):  # opened, and written, too
            time.sleep(0.05)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=send)
    thread.start()
    arguments = write_grid(tmp_path)
    assert run(arguments) == 128 + signum
    thread.join()
    assert capsys.readouterr().err == (
        f"fedmoe: {signum.name} has ended the runs; they continue with\nfedmoe benchmark {' '.join(arguments)}\n"
    )
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler
    assert run(arguments) == 0
    checkpoint = began.with_name("checkpoints") / "last.ckpt"
    out = capsys.readouterr().out
    assert "[1/2] seed_everything=0 is finished: " in out
    assert f"[2/2] seed_everything=1 goes on from {checkpoint}\n" in out
    assert began.read_text().splitlines() == ["", str(checkpoint)]


def test_a_line_says_how_far_a_run_is(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(processes, "_TELL", 0.0)
    cell = make_cells(read_grid(write_grid(tmp_path)), pretended_configured)[0]
    each = processes._Process("[1/2] seed_everything=0", cell, 0, None, began=0.0, started=0.0)
    processes._say_progress(each)
    for version, rows in (("version_2", ["FedAvg,1,0.5"]), ("version_10", ["FedAvg,1,0.5", "FedAvg,2,0.6"])):
        (cell.folder / version).mkdir(parents=True)
        (cell.folder / version / "rounds.csv").write_text("\n".join(["method,round,global_test_mean", *rows, ""]))
        processes._say_progress(each)
        processes._say_progress(each)
    each.started, each.reached = time.time() + 10, ""
    processes._say_progress(each)  # what there is, is of an earlier run
    first, second = capsys.readouterr().out.splitlines()
    assert first == "[1/2] seed_everything=0 is at FedAvg, round 1"
    assert second == "[1/2] seed_everything=0 is at FedAvg, round 2", "of the newest run"


def test_another_configuration_is_another_run(pretend, tmp_path):
    pretend("ends")
    arguments = write_grid(tmp_path)
    assert run(arguments) == 0

    def cell(*more):
        return make_cells(read_grid([*arguments, *more]), pretended_configured)[0]

    assert finished_run(cell()) == tmp_path / "runs/seed_everything=0/version_0"
    assert finished_run(cell("--overrides.trainer.accelerator", "auto")) is not None  # the same result
    other = cell("--overrides.data.init_args.batch_size", "50")
    assert finished_run(other) is None and cut_run(other) is None
    of_another_seed = replace(cell(), configuration=cell().configuration | {"seed_everything": 5})
    assert finished_run(of_another_seed) is None and cut_run(of_another_seed) is None


def test_a_run_of_more_phases_counts_unless_one_starts_from_another(tmp_path):
    path = "fedmoe_pl.algorithms."
    fedavg, fedprox, tuned = (
        {"name": name, "algorithm": {"class_path": f"{path}{name}"}, "start": None, "evaluate": True}
        for name in ("FedAvg", "FedProx", "FineTuning")
    )
    (cell, _), folder = make_cells(read_grid(write_grid(tmp_path)), pretended_configured), tmp_path / "version_0"

    def with_phases(*phases):
        federation = cell.configuration["federation"] | {"phases": [*phases]}
        return replace(cell, configuration=cell.configuration | {"federation": federation}, folder=tmp_path)

    def is_finished(of_run, of_cell):
        (folder / "config.yaml").write_text(yaml.safe_dump(with_phases(*of_run).configuration))
        return finished_run(with_phases(*of_cell)) is not None

    (folder / "checkpoints/finished").mkdir(parents=True)
    for phase in (fedavg, fedprox, tuned):
        (folder / f"checkpoints/finished/{phase['name']}.ckpt").touch()
    of_fedavg = tuned | {"start": "FedAvg"}
    assert is_finished([fedprox, fedavg, tuned], [fedavg, tuned])
    assert not is_finished([fedavg, fedprox, tuned], [fedavg, tuned]), "it starts from FedProx"
    assert is_finished([fedavg, fedprox, of_fedavg], [fedavg, of_fedavg])
    one, all_of_them = (fedavg | {"clients_per_round": number} for number in (1, 1.0))
    assert is_finished([one], [one]) and not is_finished([one], [all_of_them])
    (folder / "checkpoints/last.ckpt").touch()
    assert cut_run(with_phases(one)) and not cut_run(with_phases(all_of_them))


def test_one_process_runs_a_grid(pretend, tmp_path, capsys):
    pretend("ends")
    arguments = write_grid(tmp_path)
    (tmp_path / "runs").mkdir()
    with FileLock(tmp_path / "runs/lock"):
        assert run(arguments) == 2
    assert "another process runs a grid there now" in capsys.readouterr().err


def test_a_run_that_outlives_its_killed_command_is_waited_for(pretend, tmp_path, capsys):
    pretend("hangs")
    cells = make_cells(read_grid(write_grid(tmp_path)), pretended_configured)
    checkpoint = cells[1].folder / "version_0/checkpoints/last.ckpt"
    (checkpoint.parent / "finished").mkdir(parents=True)
    (checkpoint.parents[1] / "config.yaml").write_text(yaml.safe_dump(cells[1].configuration))
    checkpoint.touch()
    locked = threading.Event()

    def hold():
        with FileLock(checkpoint.with_name("lock")):
            locked.set()
            while "is still run" not in capsys.readouterr().out:
                time.sleep(0.05)

    thread = threading.Thread(target=hold)
    thread.start()
    assert locked.wait(10) and run(write_grid(tmp_path)) == 0
    thread.join()
    assert f"[2/2] seed_everything=1 goes on from {checkpoint}" in capsys.readouterr().out


def test_each_run_has_a_gpu_of_its_own(monkeypatch, tmp_path):
    on_cpu, _ = make_cells(read_grid(write_grid(tmp_path)), pretended_configured)
    on_gpu = replace(on_cpu, configuration={"trainer": {"accelerator": "auto"}})
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for visible, names in (("", ["0", "1", "0"]), ("3,5", ["3", "5", "3"])):
        monkeypatch.setitem(os.environ, "CUDA_VISIBLE_DEVICES", visible)
        assert [processes._gpu(on_gpu, slot) for slot in range(3)] == names
    assert processes._gpu(on_cpu, 0) is None


@pytest.mark.slow
def test_fit_writes_what_a_finished_cell_needs(tmp_path, capsys):
    arguments = write_grid(tmp_path, methods=["FedAvg"])
    cells = make_cells(read_grid(arguments), configured)
    for cell in cells:
        assert finished_run(cell) is None
        path = tmp_path / f"{cell.seed}.yaml"
        path.write_text(yaml.safe_dump(cell.configuration))
        main(["fit", "--config", str(path)])
        assert finished_run(cell) == cell.folder / "version_0"
        (cell.folder / "version_0/checkpoints/finished/FedAvg.ckpt").rename(tmp_path / "elsewhere")
        assert finished_run(cell) is None and cut_run(cell) == cell.folder / "version_0/checkpoints/last.ckpt"
        (tmp_path / "elsewhere").rename(cell.folder / "version_0/checkpoints/finished/FedAvg.ckpt")
    capsys.readouterr()
    assert run(arguments) == 0
    assert "| FedAvg | " in capsys.readouterr().out


@pytest.mark.slow
def test_a_killed_grid_is_continued(tmp_path):
    """With real runs: the benchmark gets SIGTERM after some rounds, and its table is that of a grid without it."""
    overrides = {"federation.phases.FedAvg.rounds": 100, "federation.phases.FedAvg.evaluate.every_n_rounds": 50}
    arguments = write_grid(tmp_path, overrides=overrides, methods=["FedAvg"])
    command = [sys.executable, "-m", "fedmoe_pl", "benchmark", *arguments, "--values.seed_everything", "[0]"]
    checkpoint = tmp_path / "runs/seed_everything=0/version_0/checkpoints/last.ckpt"
    with subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True) as process:
        while not checkpoint.is_file():
            assert process.poll() is None
            time.sleep(0.1)
        process.terminate()
        assert "SIGTERM has ended the runs" in process.communicate(timeout=60)[1]
    assert process.returncode == 143
    finished = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    assert "seed_everything=0 goes on from" in finished
    other = [*command, "--folder", str(tmp_path / "other")]
    whole = subprocess.run(other, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    assert markdown_tables(finished) == markdown_tables(whole)
