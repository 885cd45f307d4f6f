"""Workers of a Ray cluster give the bits of one process."""

import sys
from functools import partial

import pytest
from helpers import two_quadratics
from helpers.runs import assert_same, data, federation, model
from helpers.workers import SIZES, Fails, killing_model
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import RayBackend, TrainerBackend


@pytest.mark.parametrize("address", ["127.0.0.1:1", "ray://127.0.0.1:1", "nonsense", "auto"])
def test_a_cluster_that_is_not_there_is_refused_before_anything_is_started(address, tmp_path):
    ray = pytest.importorskip("ray")
    assert not ray.is_initialized()
    with pytest.raises(MisconfigurationException, match=f"RayBackend: address is '{address}', but there is no"):
        federation(tmp_path, backend=RayBackend(address)).fit(model(), data())
    assert not list(tmp_path.rglob("version_*"))


def test_ray_is_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MisconfigurationException, match=r'pip install "fedmoe-pl\[ray\]"'):
        RayBackend()
    with pytest.raises(MisconfigurationException, match="workers is 0, but must be at least 1"):
        monkeypatch.undo()
        pytest.importorskip("ray")
        RayBackend(workers=0)


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
    assert_same(run.run.states["PFL-MF"].kept, alone.run.states["PFL-MF"].kept)
    assert_same(run.run.states["FedAvg"].server, alone.run.states["FedAvg"].server)
    assert cluster.is_initialized(), "who started it ends it"


@pytest.mark.slow
def test_an_exception_in_ray_reaches_the_user_as_itself(tmp_path, cluster):
    run = federation(tmp_path, [Phase("FedAvg", FedAvg(), evaluate=False)], backend=RayBackend(workers=1))
    with pytest.raises(ZeroDivisionError, match="in a client"):
        run.fit(Fails(partial(ZeroDivisionError, "in a client")), two_quadratics())
    with pytest.raises(MisconfigurationException, match="workers is 9, but must be at most 2, the number of CPUs"):
        federation(tmp_path, backend=RayBackend(workers=9)).fit(model(), data())
