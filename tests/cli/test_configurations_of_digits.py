"""Every configuration of digits runs a round of each phase."""

import pytest
import yaml
from helpers.configurations import CONFIGURATIONS, QUICKSTART, REPOSITORY, needs_no_download, run_short

from fedmoe_pl import algorithms
from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.cli import main

DIGITS = [path for path in CONFIGURATIONS if needs_no_download(path)]


@pytest.mark.parametrize(
    "path",
    [
        # all methods one after the other; each has tests of its own
        pytest.param(path, marks=[pytest.mark.slow] if path.stem == "zoo_digits" else [])
        for path in [*DIGITS, REPOSITORY / "docs/figures/board.yaml"]
        if str(path) != QUICKSTART
    ],
    ids=lambda path: path.stem,
)
def test_every_configuration_of_digits_runs_one_round(path, tmp_path, capfd):
    run = run_short(path, tmp_path, capfd)
    assert {"checkpoints", "clients"} <= {file.name for file in run.iterdir()}


def algorithms_of(path) -> list[dict | str]:
    return [phase["algorithm"] for phase in yaml.safe_load(path.read_text())["federation"]["phases"]]


def test_the_zoo_has_a_phase_of_every_algorithm():
    (path,) = (path for path in DIGITS if path.stem == "zoo_digits")
    used = {(each["class_path"] if isinstance(each, dict) else each).split(".")[-1] for each in algorithms_of(path)}
    public = {name for name in algorithms.__all__ if issubclass(getattr(algorithms, name), Algorithm)}
    assert used == public


@pytest.mark.slow  # the pages' commands run it, too: tests/test_readme.py
def test_the_quickstart_runs_repeats_itself_and_serves_newcomers(tmp_path, capfd):
    (path,) = (path for path in DIGITS if str(path) == QUICKSTART)
    run = run_short(path, tmp_path, capfd)
    assert {"checkpoints", "clients"} <= {file.name for file in run.iterdir()}
    resolved = str(run / "config.yaml")
    main(["fit", "--config", resolved])
    assert (run.parent / "version_1/clients.csv").read_bytes() == (run / "clients.csv").read_bytes()
    newcomers = [
        "--data.init_args.num_clients",
        "3",
        "--data.init_args.partition_seed",
        "5",
        "--federation.logger",
        "false",
    ]
    main(["personalize", "--config", resolved, *newcomers])
    table = capfd.readouterr().out
    assert "over all 3 clients" in table and "FedAvg: global expert, after aggregation, given checkpoint" in table
    checkpoints = {path.parent.name for path in (run.parent / "new_clients/version_0/clients").rglob("*.ckpt")}
    assert checkpoints == {phase["name"] for phase in yaml.safe_load(path.read_text())["federation"]["phases"]}
