"""Workers of a Ray cluster give the bits of one process."""

import os
import re
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from helpers import two_quadratics
from helpers.runs import assert_same, data, federation, model
from helpers.workers import SIZES, Fails, killing_model
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import ClientFailures, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import RayBackend, TrainerBackend
from fedmoe_pl.phases.client_failures import ClientError


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nonsense", "auto"])
def test_a_cluster_that_is_not_there_is_refused_before_anything_is_started(address, tmp_path):
    ray = pytest.importorskip("ray")
    assert not ray.is_initialized()
    with pytest.raises(MisconfigurationException, match=f"RayBackend: address is '{address}', but there is no"):
        federation(tmp_path, backend=RayBackend(address)).fit(model(), data())
    assert not list(tmp_path.rglob("version_*"))


@pytest.mark.parametrize(
    ("address", "variable", "expected"),
    [
        (None, None, "local"),
        (None, "127.0.0.1:1", None),
        (None, "auto", "auto"),
        ("local", "127.0.0.1:1", "local"),
        ("auto", None, "auto"),
    ],
)
def test_ray_address_in_the_environment_counts_without_an_address(address, variable, expected, monkeypatch):
    ray, seen = pytest.importorskip("ray"), []
    monkeypatch.setattr(ray, "init", lambda address, **options: seen.append((address, _is_here_only())))
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 1})
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    if expected is None:
        with pytest.raises(MisconfigurationException, match=r"RAY_ADDRESS is '127\.0\.0\.1:1', but there is no Ray"):
            RayBackend(address).open()
    else:
        RayBackend(address).open()
        assert seen == [(expected, expected == "local")]


def _is_here_only() -> bool:
    return os.environ.get("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER") == "0"


@pytest.mark.parametrize("error", [TimeoutError("too slow\nmore"), RuntimeError(""), Exception("node timed out")])
def test_ray_that_does_not_start_is_refused(error, monkeypatch, tmp_path):
    ray = pytest.importorskip("ray")

    def too_slow(*arguments, **options):
        raise error

    monkeypatch.setattr(ray, "init", too_slow)
    reason = str(error).split("\n")[0] or "RuntimeError"
    sentence = f"RayBackend: address is None, but Ray did not start on this machine ({reason})."
    with pytest.raises(MisconfigurationException, match=re.escape(sentence)):
        federation(tmp_path, backend=RayBackend()).fit(model(), data())


def listening() -> set[str]:
    """The addresses and ports, in hexadecimal, on which this process and those of Ray listen."""
    sockets, children = set(), set()
    for pid in (path for path in Path("/proc").iterdir() if path.name.isdigit()):
        with suppress(OSError):
            if pid.name == str(os.getpid()) or b"ray" in (pid / "cmdline").read_bytes().split(b"\0")[0]:
                children |= {os.readlink(file) for file in (pid / "fd").iterdir()}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in children:
                sockets.add(fields[1])
    return sockets


@pytest.mark.slow
def test_ray_on_this_machine_cannot_be_reached_from_others():
    ray = pytest.importorskip("ray")
    backend = RayBackend(workers=1)
    listening_before = listening()
    backend.open()
    try:
        assert ray.is_initialized()
        addresses = {socket.split(":")[0] for socket in listening() - listening_before}
        assert addresses and addresses <= {"0100007F", "0000000000000000FFFF00000100007F", f"{1 << 24:032X}"}
    finally:
        backend.close()
    assert "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER" not in os.environ


@pytest.fixture(scope="module")
def cluster():
    ray = pytest.importorskip("ray")
    ray.init(
        num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _node_ip_address="127.0.0.1"
    )
    yield ray
    ray.shutdown()


@pytest.mark.slow
def test_ray_gives_the_bits_of_one_process_and_replaces_a_killed_one(alone, tmp_path, cluster):
    (tmp_path / "kill").touch()
    run = federation(tmp_path, backend=RayBackend(backend=TrainerBackend()))
    run.fit(killing_model(tmp_path / "kill"), data(sizes=SIZES))
    assert not (tmp_path / "kill").exists()
    assert_same(run.run.states["PFL-MF"].clients, alone.run.states["PFL-MF"].clients)
    assert_same(run.run.states["FedAvg"].server, alone.run.states["FedAvg"].server)
    assert cluster.is_initialized(), "who started it ends it"


@pytest.mark.slow
def test_an_exception_in_ray_names_the_client(tmp_path, cluster):
    phases, backend = [Phase("FedAvg", FedAvg(), evaluate=False)], RayBackend(workers=1)
    run = federation(tmp_path, phases, backend=backend, failures=ClientFailures("raise"))
    with pytest.raises(ClientError, match="round 1, client 0: ZeroDivisionError: in a client"):
        run.fit(Fails(partial(ZeroDivisionError, "in a client")), two_quadratics())
    with pytest.raises(MisconfigurationException, match="workers is 9, but must be at most 2, the number of CPUs"):
        federation(tmp_path, backend=RayBackend(workers=9)).fit(model(), data())
