"""Data and finished runs that several test modules share."""

import pytest
from helpers.runs import data, federation, model
from helpers.workers import SIZES

from fedmoe_pl.backends import TrainerBackend, trainer


@pytest.fixture
def clients_alone(monkeypatch):
    """No Trainer serves several clients, so that each is handed out alone."""
    monkeypatch.setattr(trainer, "_SAMPLES_PER_TRAINER", 0)


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """A run in one process that runs with workers are compared with."""
    run = federation(
        tmp_path_factory.mktemp("alone"), trainer={"accelerator": "cpu", "devices": 1}, backend=TrainerBackend()
    )
    run.fit(model(), data(sizes=SIZES))
    return run
