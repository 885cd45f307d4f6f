"""A run that was ended before, in or after any phase ends with the bits of one that was not, with any devices."""

import functools
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import yaml
from helpers.chains import CHAINS, Chain, Snapshots, StopsBeforeEveryPhase, outcome, quickstart
from helpers.configurations import QUICKSTART, REPOSITORY, short_file
from helpers.reports import leave_pictures_blank
from helpers.runs import assert_same

from fedmoe_pl import Federation
from fedmoe_pl.backends import PoolBackend, trainer
from fedmoe_pl.checkpoints.checkpoint import FILE, load_checkpoint
from fedmoe_pl.cli import main
from fedmoe_pl.evaluation import stacked_models

WAYS = {"1": ("auto", 1), "2": ("trainer", 2), "auto": ("auto", "auto"), "2 of stacks": ("stacked", 2)}
"""The backend and the number of devices with which a run is continued."""


@pytest.fixture(autouse=True)
def divided(monkeypatch):
    """Workers get every client alone, and start at once also where the number of devices is left to `auto`."""
    leave_pictures_blank(monkeypatch)
    monkeypatch.setattr(trainer, "_SAMPLES_PER_TRAINER", 0)
    monkeypatch.setattr(stacked_models, "_MOST", 1)
    monkeypatch.setattr(PoolBackend, "is_worth_starting", lambda pool, gain: True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Makes a run on one device that nothing ended, what it came to, and what a kill would have left at its moments."""

    @functools.cache
    def make(name: str, backend: str):
        folder = tmp_path_factory.mktemp("whole")
        moments = Snapshots(folder / "moments")
        run = CHAINS[name].fit(folder / "whole", backend, callbacks=[moments])
        return run, outcome(run), moments.moments

    return make


def continued(name: str, moment: Path, path: Path, way: str) -> Federation:
    """A run that goes on from files alone."""
    shutil.copytree(moment, path / "continued")
    return CHAINS[name].fit(path / "continued", *WAYS[way], ckpt_path="last")


def test_the_quickstart_s_phases_are_those_of_its_configuration():
    configured = yaml.safe_load(Path(QUICKSTART).read_text())["federation"]["phases"]
    algorithms = [each["algorithm"] for each in configured]
    names = [each if isinstance(each, str) else each["class_path"] for each in algorithms]
    expected = [(each["name"], name, each["gate"]) for each, name in zip(configured, names, strict=True)]
    assert [(each.name, type(each.algorithm).__name__, type(each.gate).__name__) for each in quickstart()] == expected


@pytest.mark.parametrize("moment", ["before PFL-MF", "in a round of PFL-MF"])
@pytest.mark.parametrize("way", ["1", "2"])
@pytest.mark.few(1)
def test_a_mixture_whose_experts_were_equal_is_continued_with_the_bits_of_a_whole_run(whole, tmp_path, way, moment):
    _, expected, moments = whole("tuned and mixed", WAYS[way][0])
    assert_same(outcome(continued("tuned and mixed", moments[moment], tmp_path, way)), expected)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CHAINS)
def test_a_run_is_continued_from_the_files_of_any_moment_with_any_devices(whole, tmp_path, name, way):
    if WAYS[way][0] == "stacked" and not CHAINS[name].stacks:
        pytest.skip("its clients cannot be stacked")
    _, expected, moments = whole(name, WAYS[way][0])
    for number, (moment, folder) in enumerate(moments.items()):
        run = continued(name, folder, tmp_path / str(number), way)
        try:
            assert_same(outcome(run), expected)
        except AssertionError as error:
            raise AssertionError(f"continued {moment}") from error


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CHAINS if name not in ("PFedMoE", "FedMoEDA")])  # of one phase
def test_a_run_that_is_ended_before_every_phase_and_continued_with_the_same_objects_is_a_whole_one(
    whole, tmp_path, name
):
    _, expected, _ = whole(name, "trainer")
    chain, stops = CHAINS[name], StopsBeforeEveryPhase()
    run = chain.federation(tmp_path / "stopped", *WAYS["2"], callbacks=[stops])
    model, data = chain.model(), chain.data()
    finished = False
    while not finished:
        with suppress(KeyboardInterrupt):
            run.fit(model, data, "last" if stops.seen else None)
            finished = True
    assert len(stops.seen) > 1
    assert_same(outcome(run), expected)


def results_of_commands(chain: Chain, folder: Path, devices: int) -> dict[str, object]:
    """What ``predict`` and ``personalize`` make of a finished run."""
    run = chain.federation(folder, "trainer", devices)
    run.predict(chain.model(), chain.data())
    (predictions,) = folder.rglob("predictions.csv")
    run = chain.federation(folder, "trainer", devices)
    newcomers = run.personalize(chain.model(), chain.data(sizes=(9, 6, 7)), rounds=1)
    models = {name: [run.client_module(name, client).state_dict() for client in range(3)] for name in newcomers}
    return {"predictions": predictions.read_text(), "newcomers": newcomers, "models": models}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["quickstart", "parts", "other run", "IFCA"])
def test_predictions_and_newcomers_of_a_continued_run_are_those_of_a_whole_one(whole, tmp_path, name):
    chain, (run, _, moments) = CHAINS[name], whole(name, "trainer")
    expected = results_of_commands(chain, run.runs.parent, 1)
    *_, before_last = (moment for moment in moments if moment.startswith("before"))
    continued(name, moments[before_last], tmp_path, "2")
    assert_same(results_of_commands(chain, tmp_path / "continued", 2), expected)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "signum"),
    [
        *((name, signal.SIGTERM) for name in ("finished/PFL-FB.ckpt", "finished/PFL-MF.ckpt", "rows.jsonl")),
        ("rows.jsonl", signal.SIGKILL),
    ],
)
def test_a_command_that_a_signal_ends_is_continued_with_two_devices(tmp_path, monkeypatch, file, signum):
    """The quickstart's own command, ended as soon as a file of its checkpoints is there."""
    monkeypatch.undo()  # the command has a process of its own, in which nothing is replaced
    monkeypatch.setattr("sys.argv", ["fedmoe"])  # LightningCLI warns of arguments beside those that it is given
    short = short_file(Path(QUICKSTART), tmp_path)
    arguments = ["fit", "--config", str(short), "--federation.backend", "TrainerBackend"]
    main([*arguments, "--trainer.devices", "1", "--federation.default_root_dir", str(tmp_path / "whole")])
    arguments = [*arguments, "--trainer.devices", "2", "--federation.default_root_dir", str(tmp_path / "ended")]
    ended, whole = (tmp_path / name / "quickstart/version_0" for name in ("ended", "whole"))
    command = [sys.executable, str(REPOSITORY / "cli.py"), *arguments]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        while not (ended / "checkpoints" / file).is_file():
            with pytest.raises(subprocess.TimeoutExpired):  # it has not ended
                process.wait(0.01)
        process.send_signal(signum)
    begun, phases = (load_checkpoint(folder / FILE)["phases"] for folder in (ended, whole))
    ended_with = 128 + signum if signum == signal.SIGTERM else -signum
    assert process.returncode == ended_with and len(begun) < len(phases)
    main([*arguments, "--ckpt_path", "last"])
    assert_same(load_checkpoint(ended / FILE)["phases"], phases)
    for name in ("rounds.csv", "clients.csv", "summary.csv"):
        assert (ended / name).read_bytes() == (whole / name).read_bytes()
