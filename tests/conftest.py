import gc
import math
import os

# Before torch and matplotlib are imported, and inherited by the processes that tests start.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["MPLBACKEND"] = "Agg"

import random
import socket
from collections import defaultdict

import numpy as np
import pytest
import torch

PRETENDS_GPU = "PRETENDED_GPU" in os.environ  # see test_gpu.py


def pytest_configure(config):
    gc.disable()  # while everything is imported
    torch.set_num_threads(1)  # the machine's number of cores must not change a sum
    if config.option.markexpr != "gpu":  # other tests choose no device, and are about the CPU
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if PRETENDS_GPU:
        from helpers import pretended

        pretended.register()


@pytest.hookimpl(tryfirst=True)  # before `-m "not slow"` leaves tests out
def pytest_collection_modifyitems(config, items):
    named, repetitions = {}, defaultdict(list)
    for item in items:
        if few := item.get_closest_marker("few"):
            test, *_ = item.nodeid.split("[")
            repetitions[test].append(item.callspec.id)
            if isinstance(few.args[0], int):
                is_fast = len(repetitions[test]) <= few.args[0]
            else:
                named[test] = {*few.args}
                is_fast = item.callspec.id in few.args
            if not is_fast:
                item.add_marker(pytest.mark.slow)
    unknown = [(test, ids - {*repetitions[test]}) for test, ids in named.items() if ids - {*repetitions[test]}]
    chooses_repetitions = config.getoption("lf", False) or any("::" in argument for argument in config.args)
    if unknown and not chooses_repetitions:
        raise pytest.UsageError("{}: the mark 'few' names {}, which are no repetitions".format(*unknown[0]))
    items.sort(key=lambda item: item.path.name != "test_readme.py")  # the longest: no process waits for it at the end
    if not (torch.cuda.is_available() or PRETENDS_GPU):
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device, and `pytest -m gpu`"))


def pytest_collection_finish():
    """Keeps garbage collections from scanning everything that was imported, a twentieth of the suite's time."""
    gc.freeze()
    gc.enable()


def pytest_sessionfinish():
    """Undoes the freeze; otherwise some libraries report leaks."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def same_seeds():
    """Start every test from the same random numbers, so that neither order nor selection changes a result."""
    random.seed(0)
    np.random.seed(0)
    torch.default_generator.manual_seed(0)  # torch.manual_seed also notes where it was called, for CUDA
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)


@pytest.fixture(autouse=True)
def lazy_pools_stay_in_one_process(monkeypatch):
    """Start no processes where a busy machine makes a test slow: each imports for longer than the test takes."""
    for seconds in ("_WORTH_A_SERVER", "_WORTH_FORKING"):
        monkeypatch.setattr(f"fedmoe_pl.backends.workers.process.{seconds}", math.inf)


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """Let a test that reaches for the network fail, also on a machine that has one."""
    connect = socket.socket.connect

    def connect_locally(self, address):
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"tests run offline, but this one connects to {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_locally)
