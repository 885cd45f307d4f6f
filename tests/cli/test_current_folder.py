"""``fedmoe``, started as a user starts it, in a folder that has a module of the user's own."""

import json
import runpy
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import fedmoe_pl
from fedmoe_pl.cli import main

MODEL = """
import torch
from lightning.pytorch import LightningModule


class MyModel(LightningModule):
    def __init__(self, width: int = 4):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.Linear(width, 10))

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
"""

CONFIGURATION = """
model: {class_path: my_project.model.MyModel, init_args: {width: 7}}
data: {class_path: Digits, init_args: {num_clients: 2, partitioner: IID, batch_size: 300}}
trainer: {accelerator: cpu}
federation: {phases: [{name: FedAvg, algorithm: FedAvg}], logger: false, callbacks: [ClientCheckpoint]}
"""


def test_python_m_is_the_command_and_finds_modules_in_the_current_folder(tmp_path, monkeypatch, capsys):
    (tmp_path / "my_own_module.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["fedmoe", "fit", "--model", "my_own_module.MyModel"])
    with pytest.raises(SystemExit):
        runpy.run_module("fedmoe_pl", run_name="__main__")
    assert capsys.readouterr().err == "fedmoe: model is 'my_own_module.MyModel', but my_own_module has no MyModel.\n"


def test_version(capsys):
    with pytest.raises(SystemExit) as exit:
        main(["--version"])
    assert not exit.value.code
    assert capsys.readouterr().out == f"fedmoe {fedmoe_pl.__version__}\n"


@pytest.fixture
def own_folder(tmp_path):
    """A folder with a configuration of a model that is defined there."""
    (tmp_path / "my_project").mkdir()
    (tmp_path / "my_project/model.py").write_text(MODEL)
    (tmp_path / "own.yaml").write_text(CONFIGURATION)
    yield tmp_path
    (checkpoint,) = tmp_path.rglob("all_clients.ckpt")
    assert torch.load(checkpoint, weights_only=True)["state_dict"]["net.1.weight"].shape == (7, 64)


FEDMOE = str(Path(sysconfig.get_path("scripts")) / "fedmoe")


def test_the_installed_command_imports_modules_in_the_current_folder(own_folder, monkeypatch):
    """In this process, which spares the imports; the module stays, because jsonargparse knows its class from now on."""
    monkeypatch.chdir(own_folder)
    monkeypatch.setattr("sys.argv", [FEDMOE, "fit", "--config", "own.yaml"])
    with pytest.raises(SystemExit) as exit:
        runpy.run_path(FEDMOE, run_name="__main__")
    assert not exit.value.code


@pytest.mark.slow
def test_warnings_of_what_lightning_calls_are_no_errors_of_the_user(own_folder):
    command = [sys.executable, "-W", "error", "-m", "fedmoe_pl", "fit", "--config", "own.yaml"]
    run = subprocess.run(command, cwd=own_folder, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


NOTES_WORKERS = """
    def on_train_start(self):
        import json, numpy, os
        from pathlib import Path

        processes = [Path(f"/proc/{process}") for process in (driver_of(os.getppid()), os.getppid(), os.getpid())]
        driver, server, worker = processes
        numpy.ones((999, 999)) @ numpy.ones((999, 999))  # has NumPy start its threads
        found = {
            "driver": driver.name,
            "server": server.name,
            "command lines": len({(process / "cmdline").read_text() for process in processes}),
            "threads": [len(os.listdir(process / "task")) for process in (server, worker)],
            "threads of torch": torch.get_num_threads(),
        }
        Path(f"worker_{os.getpid()}.json").write_text(json.dumps(found))


def driver_of(server):
    return open(f"/proc/{server}/stat").read().rsplit(")", 1)[1].split()[1]
"""


@pytest.mark.slow
def test_the_installed_command_forks_its_workers_which_import_modules_in_the_current_folder(own_folder):
    """A worker that was not forked from the command would have its own command line."""
    (own_folder / "my_project/model.py").write_text(MODEL + NOTES_WORKERS)
    command = [FEDMOE, "fit", "--config", "own.yaml", "--trainer.devices", "2"]
    with subprocess.Popen(command, cwd=own_folder, stderr=subprocess.PIPE, text=True) as driver:
        _, errors = driver.communicate()
    assert driver.returncode == 0, errors
    workers = [json.loads(path.read_text()) for path in own_folder.glob("worker_*.json")]
    assert len(workers) == 2
    (server,) = {worker.pop("server") for worker in workers}
    assert not Path(f"/proc/{server}").exists(), "it has ended with the command"
    alike = {"driver": str(driver.pid), "command lines": 1, "threads": [1, 1], "threads of torch": 1}
    assert workers == [alike, alike]
