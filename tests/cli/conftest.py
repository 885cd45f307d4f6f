import sys

import pytest


@pytest.fixture(autouse=True)
def no_arguments_of_pytest(monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])  # LightningCLI warns of arguments beside those that it is given


@pytest.fixture(autouse=True)
def own_path(monkeypatch):
    """The command line adds the current folder; a test's folder must not stay."""
    monkeypatch.setattr("sys.path", [*sys.path])
