"""The search: the best trial is that of separate runs, kills cost nothing, only validation chooses."""

import contextlib
import io
import itertools
import re
import sys
import time
from types import SimpleNamespace

import pytest
import yaml
from helpers.configurations import REPOSITORY
from helpers.grids import TINY, pretended_configured, write_grid
from helpers.reports import csv_rows, leave_pictures_blank, markdown_tables

pytest.importorskip("optuna")

import optuna

from fedmoe_pl.cli import command_line, main
from fedmoe_pl.cli.grid_files import read_grid, read_tuning
from fedmoe_pl.grids import processes, tune
from fedmoe_pl.grids.space import distribution_of, value_of
from fedmoe_pl.grids.trials import Trials
from fedmoe_pl.grids.tuning import Tuning

LR = "model.init_args.optimizer.init_args.lr"
RATES = {LR: {"choices": [0.001, 0.5]}}


@pytest.fixture(autouse=True)
def as_on_the_command_line(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["fedmoe"])
    monkeypatch.setattr("sys.path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    configuration = yaml.safe_load(yaml.safe_dump(TINY))
    configuration["data"]["init_args"] |= {"validation_fraction": 0.25}
    configuration["model"]["init_args"] |= {"optimizer": {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1}}}
    _, fedavg, _ = configuration["federation"]["phases"]
    configuration["federation"] |= {"name": "tiny", "phases": [fedavg | {"rounds": 3}]}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(configuration))


_MADE = {}


@pytest.fixture(autouse=True)
def made_once(monkeypatch):
    """Makes and checks what the same arguments name once for all tests; ``run.yaml`` is the same in all."""
    made = command_line.configured

    def once(arguments, check):
        key = (*arguments, check)
        if key not in _MADE:
            _MADE[key] = made(arguments, check)
        return _MADE[key]

    monkeypatch.setattr(command_line, "configured", once)


@pytest.fixture
def in_this_process(monkeypatch):
    """Lets trials run here, which spares imports; returns the commands."""
    commands = []

    def start(title, cell, slot, parallel):
        path = cell.folder / "config.yaml"
        processes._write(path, yaml.safe_dump(cell.configuration))
        commands.append(processes._command(path, processes.cut_run(cell)))
        with contextlib.redirect_stdout(io.StringIO()):
            main([*commands[-1]])
        ended = SimpleNamespace(poll=lambda: 0, wait=lambda: 0)
        return processes._Process(title, cell, slot, ended, time.monotonic())

    monkeypatch.setattr(processes, "_start", start)
    monkeypatch.setattr(processes, "_POLL", 0)
    return commands


@pytest.fixture
def no_checks(monkeypatch):
    """Leaves out the checks of values before the first trial, which take a second."""
    monkeypatch.setattr("fedmoe_pl.grids.tune._check_ends", lambda *_: None)


def command(space, *more) -> list[str]:
    flow = yaml.safe_dump({"space": space}, default_flow_style=True)
    return ["tune", "--config", "run.yaml", "--config", flow, *more]


def search(*arguments) -> int:
    with pytest.raises(SystemExit) as end:
        main(command(*arguments))
    return end.value.code


def validation(run) -> float:
    return float(csv_rows(run / "summary.csv")[0]["validation_mean"])


class Killed(BaseException):
    """Ends a command as a kill does, wherever it is raised."""


def killed(space, *more):
    with pytest.raises(Killed):
        main(command(space, *more))


@pytest.mark.slow
def test_the_best_is_that_of_separate_runs_also_after_a_kill(in_this_process, no_checks, tmp_path, capsys, monkeypatch):
    for rate in RATES[LR]["choices"]:
        main(["fit", "--config", "run.yaml", f"--{LR}={rate}", "--federation.name", f"rate_{rate}"])
    separate = {rate: validation(tmp_path / f"runs/rate_{rate}/version_0") for rate in RATES[LR]["choices"]}
    assert len({*separate.values()}) == 2
    run_round, rounds = sys.modules["fedmoe_pl.rounds.fit"].run_round, []

    def run_some_rounds(*arguments):
        rounds.append(arguments)
        if len(rounds) == 5:
            raise Killed
        return run_round(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr("fedmoe_pl.rounds.fit.run_round", run_some_rounds)
        killed(RATES, "--sampler", "BruteForceSampler")
    with (tmp_path / "runs/tiny_tune/optuna.journal").open("a") as journal:
        journal.write('{"op_code":')  # a line that was being written
    assert search(RATES, "--sampler", "BruteForceSampler") == 0  # which ends after two of twenty
    assert len(in_this_process) == 3 and "--ckpt_path" in in_this_process[-1]
    rows = csv_rows(tmp_path / "runs/tiny_tune/trials.csv")
    assert {float(row[LR]): float(row["validation"]) for row in rows} == separate
    best = max(separate, key=lambda rate: separate[rate])
    assert [float(row[LR]) for row in rows if row["best"]] == [best]
    out = capsys.readouterr().out
    assert re.search(rf"best: trial_00\d: validation {100 * separate[best]:.2f} with lr {best}\n", out)

    main(["fit", "--config", "runs/tiny_tune/best.yaml"])
    assert validation(tmp_path / "runs/tiny/version_0") == separate[best]

    leave_pictures_blank(monkeypatch)
    main(["report", "runs/tiny_tune"])
    table, results = markdown_tables((tmp_path / "report.md").read_text())
    assert len(table) == 3 and len(results) == 2
    assert [line[0].startswith("**") for line in table[1:]] == [bool(row["best"]) for row in rows]
    assert (tmp_path / "report.html").read_text().count('<tr class="best">') == 1


# Writes the rounds of a run, the value in its learning rate, and does not end if that is bad.
SCRIPT = """
import os, pathlib, shutil, sys, time, yaml
config = yaml.safe_load(open(sys.argv[3]))
rate = config["model"]["init_args"]["optimizer"]["init_args"]["lr"]
folder = pathlib.Path(config["federation"]["default_root_dir"]) / config["federation"]["name"] / "version_0"
(folder / "checkpoints/finished").mkdir(parents=True)
shutil.copy(sys.argv[3], folder / "config.yaml")
table = "method,round,validation_mean\\n" + "".join(f"FedAvg,{round},{rate}\\n" for round in (1, 2, 3))
(folder / "rounds.csv.tmp").write_text(table)
os.replace(folder / "rounds.csv.tmp", folder / "rounds.csv")
time.sleep(60 if rate < 0.2 else 0)
(folder / "summary.csv").write_text(table[:28] + table[-len(table[28:]) // 3 :])
(folder / "checkpoints/finished/FedAvg.ckpt").touch()
"""


@pytest.fixture
def pretended(monkeypatch, no_checks, tmp_path):
    """Lets trials run the script in place of ``fedmoe fit``."""
    (tmp_path / "fit.py").write_text(SCRIPT)
    monkeypatch.setattr(processes, "_PROGRAM", [sys.executable, "fit.py"])


@pytest.mark.slow
def test_a_bad_trial_is_ended(pretended, tmp_path, monkeypatch, capsys):
    drawn = iter([0.9, 0.1, 0.9])
    monkeypatch.setattr(optuna.samplers.RandomSampler, "sample_independent", lambda *_: next(drawn))
    pruner = ["--sampler", "RandomSampler", "--pruner.n_startup_trials", "1", "--pruner.n_warmup_steps", "1"]
    assert search({LR: {"low": 0.1, "high": 1.0}}, "--trials", "3", *pruner) == 0
    rows = csv_rows(tmp_path / "runs/tiny_tune/trials.csv")
    assert [(row["state"], row["round"], row["validation"]) for row in rows] == [
        *(("complete", "3", "0.9"), ("pruned", "1", "0.1"), ("complete", "", "0.9"))
    ]
    out = capsys.readouterr().out
    assert "[2/3] trial_001 (lr 0.1) is pruned after" in out
    assert "[3/3] trial_002 (lr 0.9) has the values of trial_000" in out


class Draws:
    """Trials of a study in memory, which are told values and not run."""

    def __init__(self, tmp_path, space, study=None, seed=0, metric="validation", method="FedAvg"):
        self.study = study or optuna.create_study(direction="maximize")
        sampler = {"class_path": "optuna.samplers.RandomSampler", "init_args": {"seed": None}}
        tuning = Tuning(space, metric=metric, method=method, trials=3, seed=seed, sampler=sampler)
        distributions = {key: distribution_of(key, entry) for key, entry in space.items()}
        grid = read_grid(write_grid(tmp_path, values={}))
        self.trials = Trials(self.study, distributions, tuning, grid, pretended_configured)

    def drawn(self, number, told=0.5):
        """The next drawn values of the only key, as the cells have them."""
        found = []
        for _, cell in itertools.islice(self.trials.cells(), number):
            found += [value for key, value in cell.where.items() if key != "variant"]
            self.study.tell(self.trials.running.pop(cell.name), told)
        return found


def test_every_trial_draws_values_of_its_own_which_the_seed_and_the_number_of_the_trial_decide(tmp_path):
    space = {LR: {"low": 0.0, "high": 1.0}}
    whole = Draws(tmp_path, space).drawn(3)
    assert len({*whole}) == 3
    before = Draws(tmp_path, space)
    assert before.drawn(2) == whole[:2] and Draws(tmp_path, space, before.study).drawn(1) == whole[2:]
    assert not {*Draws(tmp_path, space, seed=1).drawn(3)} & {*whole}


def test_values_that_were_drawn_before_have_the_same_result_without_a_run(tmp_path):
    draws = Draws(tmp_path, {LR: {"choices": [0.25]}})
    assert draws.drawn(3, told=0.75) == [0.25]
    assert [trial.value for trial in draws.study.trials] == [0.75] * 3


def test_a_search_ends_when_its_sampler_says_so_and_an_error_of_the_sampler_is_one(tmp_path, monkeypatch):
    draws = Draws(tmp_path, {LR: {"choices": [0.25, 0.5]}})
    draws.trials.tuning.sampler["class_path"] = "optuna.samplers.BruteForceSampler"
    assert sorted(draws.drawn(3)) == [0.25, 0.5] and len(draws.study.trials) == 2

    def after_trial(*arguments):
        raise RuntimeError("broken")

    monkeypatch.setattr(optuna.samplers.RandomSampler, "after_trial", after_trial)
    with pytest.raises(RuntimeError, match="broken"):
        Draws(tmp_path, {LR: {"choices": [0.25]}}).drawn(1)


def test_a_drawn_name_stands_for_the_choice_that_has_it():
    gates = [{"class_path": name, "init_args": {"hidden": 8}} for name in ("FeatureGate", "LinearGate")]
    assert [value_of({"choices": gates}, name) for name in ("LinearGate", "FeatureGate")] == gates[::-1]
    assert value_of({"choices": [1, "x"]}, "x") == "x" and value_of({"low": 0, "high": 1}, 0.5) == 0.5


def test_the_value_of_a_trial_is_the_mean_in_the_summary_of_the_chosen_method(tmp_path, monkeypatch):
    header = "method,round,validation_mean,validation_worst_tenth"
    rounds = [f"{name},{number},0.{number}{digit},0.0" for name, digit in (("A", 1), ("B", 2)) for number in (1, 2, 3)]
    summary = ["A,3,0.875,0.0", "B,2,0.75,0.25", "C,3,0.125,0.0"]
    draws = Draws(tmp_path, {LR: {"choices": [0.25]}}, method="B")
    ((_, cell),) = itertools.islice(draws.trials.cells(), 1)
    folder = cell.folder / "version_0"
    folder.mkdir(parents=True)
    for name, lines in (("rounds", rounds), ("summary", summary)):
        (folder / f"{name}.csv").write_text("\n".join([header, *lines, ""]))
    monkeypatch.setattr("fedmoe_pl.grids.trials.finished_run", lambda _: folder)
    monkeypatch.setattr(draws.trials, "write", lambda: None)
    draws.trials.on_end(cell, has_succeeded=True)
    (trial,) = draws.study.trials
    assert (trial.value, trial.intermediate_values) == (0.75, {1: 0.12, 2: 0.22, 3: 0.32})


def test_the_last_evaluated_phase_counts_and_errors_are_minimized(tmp_path):
    phases = [SimpleNamespace(name=name, evaluate=evaluate) for name, evaluate in (("A", 1), ("B", 1), ("C", 0))]
    named = [tune._method(Tuning({}, method=method), SimpleNamespace(phases=phases)) for method in (None, "A")]
    assert named == ["B", "A"]
    pruner = optuna.pruners.NopPruner()
    directions = [tune._study(tmp_path / f"{lower}.journal", lower, pruner).direction.name for lower in (True, False)]
    assert directions == ["MINIMIZE", "MAXIMIZE"]


REFUSED = [
    ({LR: {"low": 2, "high": 1}}, [], rf"space.{LR} is .* `low <= high` must hold"),
    ({LR: {"low": 0, "high": 1, "log": True}}, [], "must hold for `log=True`"),
    ({LR: {"low": "x", "high": 1}}, [], rf"space.{LR}.low is 'x', but must be a finite number"),
    ({LR: {"low": 1, "high": 3, "log": "yes"}}, [], "log is 'yes', but must be true or false"),
    ({LR: {"low": 1, "hihg": 3}}, [], r"but must be \{low: 1, high: 5\}, perhaps"),
    ({LR: 0.1}, [], r"is 0.1, but must be \{low"),
    ({LR: {"choices": [1, 1]}}, [], "a list that has every value once"),
    ({LR: {"choices": [1, 1.0]}}, [], r"every value once, because 1, 1\.0 and true are one"),
    ({LR: {"choices": []}}, [], "a list that has every value once"),
    ({"seed_everything": {"low": 1, "high": 3}}, [], "left out, because the best one of some seeds is luck"),
    ({}, [], "keys of the run with their values"),
    (RATES, ["--trails", "3"], r"trails is not an argument; did you mean trials\?"),
    (RATES, ["--sampler", "TPE"], "sampler is 'TPE', but must be BaseSampler"),
    (RATES, ["--config", "{trials: null, space: {}}"], "tune: trials is None, but must be int above 0"),
    (RATES, ["--config", "nope.yaml"], "config is 'nope.yaml', but it cannot be read: No such file"),
    (RATES, ["--sampler.seed", "3"], "tune derives one for each trial"),
    (RATES, ["--metric", "local_test"], "validation samples, because what is chosen by test samples looks better"),
    (RATES, ["--metric", "valdiation"], "one of validation, validation_loss"),
    (RATES, ["--method", "FedProx"], "method is 'FedProx', but must be one of FedAvg"),
    (RATES, ["--data.init_args.validation_fraction", "0"], "there are no validation samples"),
    ({"federation.phases.FedAvg.select.monitor": {"choices": ["global_test"]}}, [], "select.monitor is 'global_test'"),
    ({"trainer.max_epoch": {"low": 1, "high": 3}}, [], r"max_epoch is not an argument; did you mean"),
    ({"federation.phases.FedAvg.clients_per_round": {"low": 0.1, "high": 2.0}}, [], "is 2.0, but must be"),
]


@pytest.mark.slow
def test_what_is_wrong_is_refused_in_a_sentence_before_any_trial(capsys, tmp_path):
    for space, more, sentence in REFUSED:
        assert search(space, *more) == 2, sentence
        error = capsys.readouterr().err
        assert error.count("\n") == 1 and re.search(sentence, error), error
    assert not [*tmp_path.glob("runs/*/trial*")]


def test_without_optuna_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert search(RATES) == 2
    assert capsys.readouterr().err == 'fedmoe: tune needs Optuna: pip install ".[tune]" in the repository.\n'


@pytest.mark.slow
def test_the_page_shows_the_configuration_of_the_package_and_code_that_runs(capsys):
    page = (REPOSITORY / "docs/guide/tune.md").read_text()
    (shown,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    path = REPOSITORY / "configs/tune/quickstart.yaml"
    assert yaml.safe_load(shown) == yaml.safe_load(path.read_text())
    tuning, of_run = read_tuning(["--config", "run.yaml", "--config", str(path), "--trials", "3"])
    assert (tuning.trials, of_run[:2], len(of_run)) == (3, ["--config", "run.yaml"], 4)
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(code, {})
    assert "'lr': " in capsys.readouterr().out
