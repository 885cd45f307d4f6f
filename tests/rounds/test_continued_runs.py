"""A run that was ended before, in or after any phase ends with the bits of one that was not, with any devices."""

import functools
import shutil
from pathlib import Path

import pytest
import yaml
from helpers.chains import CHAINS, Snapshots, outcome, quickstart
from helpers.configurations import QUICKSTART
from helpers.reports import leave_pictures_blank
from helpers.runs import assert_same

from fedmoe_pl import Federation
from fedmoe_pl.backends import PoolBackend, trainer
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
    if (earlier := moment.parents[1] / "other").exists():
        shutil.copytree(earlier, path / "other", dirs_exist_ok=True)
    return CHAINS[name].fit(path / "continued", *WAYS[way], ckpt_path="last")


def test_the_quickstart_s_phases_are_those_of_its_configuration():
    configured = yaml.safe_load(Path(QUICKSTART).read_text())["federation"]["phases"]
    algorithms = [each["algorithm"] for each in configured]
    names = [each if isinstance(each, str) else each["class_path"] for each in algorithms]
    expected = [(each["name"], name, each["gate"]) for each, name in zip(configured, names, strict=True)]
    assert [(each.name, type(each.algorithm).__name__, type(each.gate).__name__) for each in quickstart()] == expected


@pytest.mark.parametrize("moment", ["before PFL-MF", "in a round of PFL-MF"])
@pytest.mark.parametrize("way", ["1", "2"])
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
