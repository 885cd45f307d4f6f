import pytest


@pytest.fixture(autouse=True)
def no_arguments_of_pytest(monkeypatch):
    monkeypatch.setattr("sys.argv", ["fedmoe"])  # LightningCLI warns of arguments beside those that it is given
