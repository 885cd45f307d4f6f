"""Data and finished runs that several test modules share."""

import pytest
from helpers.runs import data, federation
from helpers.workers import SIZES, killing_model

from fedmoe_pl.backends import TrainerBackend, trainer


@pytest.fixture
def clients_alone(monkeypatch):
    """No Trainer serves several clients, so that each is handed out alone."""
    monkeypatch.setattr(trainer, "_SAMPLES_PER_TRAINER", 0)


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """A run in one process that runs with workers are compared with."""
    folder = tmp_path_factory.mktemp("alone")
    run = federation(folder, trainer={"accelerator": "cpu", "devices": 1}, backend=TrainerBackend())
    run.fit(killing_model(folder / "kill"), data(sizes=SIZES))  # which kills workers only
    return run
