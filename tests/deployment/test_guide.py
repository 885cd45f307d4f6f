"""What the guide tells a new user to write works as it stands there."""

import re
import runpy
from pathlib import Path

import pytest
import torch
from helpers.deployed import Passing

from fedmoe_pl.cli.command_line import objects_of
from fedmoe_pl.deployment import Participant, serve

GUIDE = Path(__file__).parents[2] / "docs/guide/deployment.md"


def block(language):
    """The first block of code in a language."""
    found = re.search(rf"```{language}\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found is not None
    return found[1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(block("yaml"))
    Path("make.py").write_text(block("python"))
    runpy.run_path("make.py")
    return tmp_path


@pytest.mark.slow
def test_its_configuration_and_its_two_hospitals_are_a_federation(folder):
    quiet = ["--config", "run.yaml", "--federation.logger", "false", "--federation.enable_progress_bar", "false"]
    clients = {}
    for client in range(2):
        own = ["--data.init_args.path", f"hospital_{client}.npz"]
        clients[client] = Participant(*objects_of([*quiet, *own]), client, folder / f"client_{client}")
    settings, model, data = objects_of(quiet)
    torch.manual_seed(0)
    results = serve(settings, model, data, Passing(clients), 2)
    assert [*results] == ["FedAvg", "PFL-FT", "PFL-MFE"]
    assert results["PFL-MFE"].spread("global_test").mean > 0.85


def test_every_row_of_the_threat_model_names_tests_that_exist():
    page = GUIDE.with_name("threat_model.md").read_text()
    rows = re.search(r"needs \| test \|\n[| -]+\n(.*?)\n\n", page, re.DOTALL)
    assert rows is not None and len(rows[1].splitlines()) > 10
    for row in rows[1].splitlines():
        names = re.findall(r"`((?:\w+/)?test_\w+\.py)`", row)
        tests = Path(__file__).parents[1]
        assert names and all((tests / (name if "/" in name else f"deployment/{name}")).is_file() for name in names)
