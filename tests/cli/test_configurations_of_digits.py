"""Every configuration of digits runs a round of each phase."""

import pytest
import yaml
from helpers.configurations import CONFIGURATIONS, QUICKSTART, REPOSITORY, needs_no_download, run_short
from helpers.reports import leave_pictures_blank

from fedmoe_pl import algorithms
from fedmoe_pl.algorithms.algorithm import Algorithm

OF_ADAPTERS = {  # they need peft, the zoo does not
    *("CoMiGS", "FedALT", "FedDPA", "FedExLoRA", "FedLEASE", "FlexLoRA", "HetLoRA"),
}
DIGITS = [path for path in CONFIGURATIONS if needs_no_download(path)]


@pytest.mark.few("time_series")
@pytest.mark.parametrize(
    "path",
    [path for path in [*DIGITS, REPOSITORY / "docs/figures/board.yaml"] if str(path) != QUICKSTART],
    ids=lambda path: path.stem,
)
def test_every_configuration_of_digits_runs_one_round(path, tmp_path, capfd, monkeypatch):
    leave_pictures_blank(monkeypatch)
    run = run_short(path, tmp_path, capfd)
    assert {"checkpoints", "summary.csv"} <= {file.name for file in run.iterdir()}


def algorithms_of(path) -> list[dict | str]:
    return [phase["algorithm"] for phase in yaml.safe_load(path.read_text())["federation"]["phases"]]


def test_the_zoo_has_a_phase_of_every_algorithm():
    (path,) = (path for path in DIGITS if path.stem == "zoo_digits")
    used = {(each["class_path"] if isinstance(each, dict) else each).split(".")[-1] for each in algorithms_of(path)}
    public = {name for name in algorithms.__all__ if issubclass(getattr(algorithms, name), Algorithm)}
    assert used == public - OF_ADAPTERS
