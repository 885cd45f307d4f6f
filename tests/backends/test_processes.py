"""Processes that workers run in: alike to the driver, with the bits of one process, whatever happens to them."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.backends import begin
from helpers.runs import Kill, assert_same, data, federation, model
from helpers.workers import (
    CPU,
    SIZES,
    Fails,
    TwoInThisProcess,
    killing_model,
    trained,
    trained_round,
    training,
    wait_until,
    workers,
)
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader

from fedmoe_pl import ClientFailures, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import PoolBackend, TrainerBackend
from fedmoe_pl.backends.workers import fork_server, process
from fedmoe_pl.backends.workers.fork_server import ForkServer, _Fork, start_server
from fedmoe_pl.backends.workers.pickling import SharedObject, dumps, loads
from fedmoe_pl.phases.client_failures import ClientError


def test_a_shared_object_is_mapped_with_its_strides_and_written_to_by_one_process_alone():
    whole = torch.arange(10_000.0)
    images = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    layer = torch.nn.Linear(300, 300)
    obj = {
        "parts": [whole[10:20], whole[::2], whole[:0], torch.tensor(3), whole.bfloat16().view(100, 100).T],
        "images": images,
        "twice": [layer.weight, layer.weight.data],
        "array": np.arange(5)[::-1],
        "text": "text",
    }
    shared = SharedObject(obj)
    path = shared.path
    assert Path(path).stat().st_size < 4 * 300 * 300 + 100_000, "the weight is there once"
    loaded, other = shared.load(), shared.load()
    for name in ("parts", "images"):
        assert_same(loaded[name], obj[name])
    assert loaded["images"].stride() == images.stride()
    assert_same(loaded["twice"], obj["twice"])
    assert loaded["twice"][0].data_ptr() == loaded["twice"][1].data_ptr()
    assert (loaded["array"] == obj["array"]).all() and loaded["text"] == "text"
    loaded["twice"][1].zero_()
    assert_same(other["twice"], obj["twice"])
    del shared
    assert not Path(path).exists()


def in_workers(job, devices=1) -> list:
    """What a job returns in each of some groups."""
    backend = PoolBackend(TrainerBackend(), [CPU] * devices)
    plan = begin(backend, training())
    try:
        return list(plan.map(job, {}, [[0], [1]], {}))
    finally:
        backend.close()


def test_a_worker_is_a_single_thread_alike_to_the_driver_and_may_have_children(monkeypatch, tmp_path):
    monkeypatch.setenv("SET_BY_DRIVER", "after the server has started")
    start_server()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py", "argument"])
    monkeypatch.setattr(sys, "path", [*sys.path, "folder of the user"])

    def job(plan, server, groups, kept):
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
        found = {
            "pid": os.getpid(),
            "threads": [len(os.listdir(f"/proc/{process}/task")) for process in (os.getppid(), os.getpid())],
            "settings": (os.getcwd(), sys.argv, sys.path, os.environ["SET_BY_DRIVER"], os.environ["OMP_NUM_THREADS"]),
            "SIGINT": signal.SIGINT in blocked,
            "CUDA": torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork(),
            "samples": [int(sample) for sample in DataLoader([4, 5], num_workers=1)],
            "daemonic": multiprocessing.current_process().daemon,
        }
        return [found for _ in groups]

    found, _ = in_workers(job)
    assert found.pop("pid") != os.getpid()
    assert found == {
        "threads": [1, 1],
        "settings": (str(tmp_path), sys.argv, sys.path, "after the server has started", "1"),
        "SIGINT": True,
        "CUDA": False,
        "samples": [4, 5],
        "daemonic": False,
    }


def test_an_idle_worker_gives_back_what_it_has_freed():
    def work(plan, server, groups, kept):
        torch.ones(10_000, 1000)  # 38 MiB
        return [(os.getpid(), private_mebibytes(os.getpid())) for _ in groups]

    backend = PoolBackend(TrainerBackend(), [CPU])
    try:
        _, (worker, mebibytes) = begin(backend, training()).map(work, {}, [[0], [1]], {})
        wait_until(lambda: private_mebibytes(worker) < mebibytes - 30)
    finally:
        backend.close()


def private_mebibytes(process: int) -> float:
    """What only this process has in memory."""
    rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
    return int(rollup.split("Private_Dirty:")[1].split()[0]) / 1024


def test_a_run_without_workers_ends_a_server_that_was_forked(tmp_path, monkeypatch):
    def until_closed(ours, control):
        return _Fork(
            os.posix_spawnp("cat", ["cat"], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, control.fileno(), 0)])
        )

    server = ForkServer(until_closed)
    monkeypatch.setattr(fork_server, "_server", server)
    assert server.is_alive
    federation(tmp_path, [Phase("FedAvg", FedAvg())], trainer={"devices": 1, "accelerator": "cpu"}).fit(model(), data())
    assert not server.is_alive


def test_a_lazy_pool_prepares_its_server_for_five_seconds_and_forks_for_one(monkeypatch):
    monkeypatch.undo()  # otherwise none starts in tests
    log, is_ready = [], [False]
    monkeypatch.setattr(process, "start_server", lambda: log.append("started"))
    monkeypatch.setattr(process, "is_server_ready", lambda: is_ready[0])
    lazy = PoolBackend(TrainerBackend(), [CPU, CPU], lazy=True)
    lazy.open()
    assert not lazy.is_worth_starting(4) and not log
    assert not lazy.is_worth_starting(6) and log == ["started"]
    is_ready[0] = True
    assert lazy.is_worth_starting(1) and not lazy.is_worth_starting(0.5)
    assert log == ["started"]


@pytest.mark.slow
def test_another_server_starts_where_one_was_killed():
    phase, backend = training(), PoolBackend(TrainerBackend(), [CPU, CPU])
    expected = trained(TrainerBackend(), phase)
    plan = begin(backend, phase)
    assert_same(trained_round(plan), expected)
    first = start_server()
    first.process.kill()
    for worker in list(backend.workers):
        os.kill(worker.pid.result(), signal.SIGKILL)
    assert_same(trained_round(plan), expected)
    assert start_server() is not first
    backend.close()


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


@pytest.mark.usefixtures("clients_alone")
def test_without_room_for_the_data_a_lazy_pool_goes_on_without(monkeypatch):
    def full(*arguments, **named):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.TemporaryFile", full)
    monkeypatch.setattr(PoolBackend, "is_worth_starting", lambda pool, gain: True)
    phase = training()
    with pytest.warns(UserWarning, match="Training continues in one process: .*No space left on device"):
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
