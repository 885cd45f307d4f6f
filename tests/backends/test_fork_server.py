"""Processes that workers run in: forked from a server without threads, and alike to the driver."""

import multiprocessing
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.backends import begin
from helpers.runs import assert_same, data, federation, model
from helpers.workers import CPU, trained, training, wait_until
from torch.utils.data import DataLoader

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import PoolBackend, TrainerBackend
from fedmoe_pl.backends.workers import fork_server, process
from fedmoe_pl.backends.workers.fork_server import ForkServer, _Fork, start_server
from fedmoe_pl.backends.workers.pickling import SharedObject


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


@pytest.fixture
def lazy_pools_stay_in_one_process():
    """Of all tests: here they start."""


def test_a_lazy_pool_prepares_its_server_for_five_seconds_and_forks_for_one(monkeypatch):
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
    assert_same([*plan.train(plan_server(phase), [0, 1, 2, 3], {}, 0)], expected)
    first = start_server()
    first.process.kill()
    for worker in list(backend.workers):
        os.kill(worker.pid.result(), signal.SIGKILL)
    assert_same([*plan.train(plan_server(phase), [0, 1, 2, 3], {}, 0)], expected)
    assert start_server() is not first
    backend.close()


def plan_server(phase):
    return phase.algorithm.server_init(phase.module)
