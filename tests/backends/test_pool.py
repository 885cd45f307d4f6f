"""Processes of this machine give the bits of one process, whatever happens to them."""

import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers.runs import Kill, assert_same, data, federation
from helpers.workers import CPU, SIZES, Fails, TwoInThisProcess, killing_model, trained, training, wait_until, workers
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fedmoe_pl import ClientFailures, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import PoolBackend, TrainerBackend
from fedmoe_pl.backends.workers.pickling import dumps, loads
from fedmoe_pl.phases.participation import ClientError


@pytest.mark.usefixtures("clients_alone")
def test_what_cannot_be_sent_is_refused_and_a_lazy_pool_goes_on_without(monkeypatch):
    datamodule = data(sizes=SIZES)
    datamodule.lock = threading.Lock()
    phase = training(datamodule=datamodule)
    with pytest.raises(
        MisconfigurationException, match="devices must be 1 here, because the data module cannot be sent"
    ):
        trained(PoolBackend(TrainerBackend(), [CPU, CPU]), phase)
    monkeypatch.setattr(PoolBackend, "is_worth_starting", lambda pool, gain: True)
    with pytest.warns(UserWarning, match="Training continues in one process: trainer.devices must be 1"):
        updates = trained(PoolBackend(TrainerBackend(), [CPU, CPU], lazy=True), phase)
    assert_same(updates, trained(TrainerBackend(), phase))


def test_modules_with_parametrizations_are_sent():
    layer = weight_norm(nn.Linear(3, 2))
    sent = loads(dumps(layer))
    x = torch.ones(1, 3)
    assert torch.equal(sent(x), layer(x)) and type(sent.parametrizations) is type(layer.parametrizations)
    with torch.no_grad():
        sent.parametrizations.weight.original0.mul_(2)
    assert torch.allclose(sent.weight, 2 * layer.weight), "computed from its parts"


@pytest.mark.usefixtures("clients_alone")
@pytest.mark.parametrize(("rounds", "starts"), [(2, False), (10**4, True)])
def test_a_lazy_pool_starts_only_where_it_shortens_the_phase(rounds, starts):
    pool, phase = TwoInThisProcess(lazy=True), training(rounds=rounds)
    assert_same(trained(pool, phase), trained(TrainerBackend(), phase))
    assert [entry[2] for entry in pool.log] == ([[2], [3]] if starts else []), "two groups are measured first"


def test_two_workers_give_the_bits_of_one_process_also_if_one_is_killed_and_after_the_run_was_stopped(alone, tmp_path):
    """The run is stopped in its last phase, which ends the workers, and goes on in one process."""
    kill = tmp_path / "kill"
    kill.touch()
    devices = [{"accelerator": "cpu", "devices": number} for number in (1, 2)]
    run = federation(tmp_path, trainer=devices[1], backend=TrainerBackend(), callbacks=[Kill("on_client_end", 19)])
    with pytest.raises(KeyboardInterrupt):
        run.fit(killing_model(kill), data(sizes=SIZES))
    assert not kill.exists()
    wait_until(lambda: not workers())
    run = federation(tmp_path, trainer=devices[0], backend=TrainerBackend())
    run.fit(killing_model(kill), data(sizes=SIZES), ckpt_path="last")
    assert_same(run.run.states, alone.run.states)
    for name in ("rounds.csv", "clients.csv", "summary.csv"):
        assert (run.run_dir / name).read_bytes() == (alone.run_dir / name).read_bytes()


def test_an_exception_in_a_worker_names_the_client_and_closes_the_workers(tmp_path):
    phases, pool = [Phase("FedAvg", FedAvg(), evaluate=False)], TwoInThisProcess()
    run = federation(tmp_path, phases, backend=pool, failures=ClientFailures("raise"))
    message = "^Phase 'FedAvg', round 1, client 0: ZeroDivisionError: in a client$"
    with pytest.raises(ClientError, match=message) as error:
        run.fit(Fails(partial(ZeroDivisionError, "in a client")), data(sizes=SIZES))
    cause = error.value.__cause__
    assert isinstance(cause, ZeroDivisionError) and "in training_step" in str(cause.__cause__)
    assert pool.workers == [] and pool.log.count("end") == 2


SCRIPT = """
import os, sys, time
import torch
from fedmoe_pl import Federation, PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.data import Digits

class Expert(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
    def forward(self, x):
        if len(sys.argv) > 3 and os.getpid() != driver:
            print(os.getpid(), flush=True)
            time.sleep(60)
        return super().forward(x.flatten(1))

class MyAverage(FedAvg):
    pass

driver = os.getpid()
torch.manual_seed(0)
federation = Federation(
    [Phase("mine", MyAverage("global_expert.*"), rounds=2)],
    trainer={"accelerator": "cpu", "devices": int(sys.argv[2])}, backend=TrainerBackend(),
    logger=False, default_root_dir=sys.argv[1], enable_progress_bar=False,
)
federation.fit(PersonalizedMoE(Expert(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
               Digits(num_clients=3))
"""


@pytest.mark.slow
def test_a_script_needs_no_guard_and_its_classes_travel(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    results = []
    for devices in "12":
        command = [sys.executable, "-W", "error", "-W", "ignore::FutureWarning", "script.py", devices, devices]
        finished = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        assert finished.returncode == 0, finished.stderr
        accuracies = (tmp_path / devices / "federation/version_0/clients.csv").read_bytes()
        results.append((finished.stderr.replace(", in up to 2 processes", ""), accuracies))
    assert results[0] == results[1], "the same bits, and nothing more is said"


def parent(process: Path) -> int:
    return int((process / "stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_workers_and_their_server_end_with_the_driver(tmp_path, how):
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", "out", "2", "sleep"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        processes = [Path(f"/proc/{process.stdout.readline().strip()}") for _ in range(2)]
        processes.append(Path(f"/proc/{parent(processes[0])}"))
        process.send_signal(how)
        process.wait(10)
        wait_until(lambda: not any(process.exists() for process in processes))
