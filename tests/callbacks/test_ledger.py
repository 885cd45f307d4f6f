"""``traffic.csv`` of every method: complete, without private tensors, and the same after a kill and in workers."""

import csv
import inspect
from collections import Counter
from fnmatch import fnmatchcase
from functools import cache

import pytest
from helpers import run
from helpers.methods import METHODS, data
from helpers.runs import Kill, federation
from helpers.runs import data as data_of_a_run
from helpers.runs import model as model_of_a_run
from lightning.pytorch.loggers import CSVLogger

from fedmoe_pl import Algorithm, algorithms
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.callbacks import TrafficLedger


def ledger(federation) -> list[dict]:
    with (federation.run_dir / "traffic.csv").open() as file:
        return [*csv.DictReader(file)]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Runs a method once, with a ledger."""

    @cache
    def fitted(name):
        method, folder = METHODS[name], tmp_path_factory.mktemp("method")
        arguments = {"backend": TrainerBackend(), "callbacks": [TrafficLedger()]}
        return run(method.phases(), method.model(), data(), folder, **arguments)

    return fitted


def test_these_are_all_methods_of_the_package():
    public = (getattr(algorithms, name) for name in algorithms.__all__)
    kinds = {kind for kind in public if inspect.isclass(kind) and issubclass(kind, Algorithm)}
    assert {type(phase.algorithm) for method in METHODS.values() for phase in method.phases()} == kinds


@pytest.mark.parametrize("name", METHODS)
def test_the_rows_of_every_method_add_up_to_its_traffic(name, recorded):
    federation = recorded(name)
    sums = Counter()
    for row in ledger(federation):
        sums[row["phase"], {"requests": "up"}.get(row["direction"], row["direction"])] += int(row["bytes"])
    for phase, state in federation.run.states.items():
        for way in ("down", "up", "between_clients"):
            assert sums[phase, way] == state.traffic[f"bytes_{way}"], (phase, way)


@pytest.mark.parametrize("name", METHODS)
def test_what_a_method_declares_private_never_leaves_a_client(name, recorded):
    names = {row["tensor"] for row in ledger(recorded(name)) if row["direction"] != "down"}
    names |= {name.partition(".")[2] for name in names}  # between clients, a name begins with the sender's id
    assert not [tensor for tensor in names for pattern in METHODS[name].private if fnmatchcase(tensor, pattern)]


def test_a_row_says_what_was_sent(recorded):
    every = ledger(recorded("FedPer"))
    common = {"phase": "FedPer", "round": "1", "client": every[0]["client"]}
    rows = [row for row in every if row.items() >= common.items()]
    weight = {"tensor": "local_expert.extractor.1.weight", "shape": "6x5", "dtype": "float64", "bytes": "240"}
    bias = {"tensor": "local_expert.extractor.1.bias", "shape": "6", "dtype": "float64", "bytes": "48"}
    number = {"tensor": "(weight)", "shape": "()", "dtype": "float", "bytes": "0"}
    sent = [("down", weight), ("down", bias), ("up", weight), ("up", bias), ("up", number)]
    assert rows == [{**common, "direction": direction, **row} for direction, row in sent]


def test_without_a_ledger_nothing_is_described(tmp_path):
    method = METHODS["FedAvg"]
    without = run(method.phases(), method.model(), data(), tmp_path)
    assert not without.run.records_transfers and not (without.run_dir / "traffic.csv").exists()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp("whole"))


def fitted(path, *callbacks, ckpt_path=None, **kwargs):
    run = federation(path, callbacks=[*callbacks, TrafficLedger()], **kwargs)
    run.fit(model_of_a_run(), data_of_a_run(), ckpt_path=ckpt_path)
    return run


@pytest.mark.parametrize(
    ("hook", "n"), [("on_transfers", 3), ("on_round_end", 3), ("on_client_end", 6), ("on_phase_end", 2)]
)
def test_the_file_of_a_killed_run_goes_on_where_it_was(hook, n, whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path, Kill(hook, n))
    resumed = fitted(tmp_path, ckpt_path="last")
    assert (resumed.run_dir / "traffic.csv").read_bytes() == (whole.run_dir / "traffic.csv").read_bytes()


def test_a_row_that_a_kill_cut_off_is_removed(whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path, Kill("on_round_end", 3))
    (path,) = tmp_path.rglob("traffic.csv")
    with path.open("a") as file:
        file.write("FedAvg,1,do")
    resumed = fitted(tmp_path, ckpt_path="last")
    assert path == resumed.run_dir / "traffic.csv"
    assert path.read_bytes() == (whole.run_dir / "traffic.csv").read_bytes()


@pytest.mark.slow
def test_workers_write_the_same_file(whole, tmp_path):
    parallel = fitted(tmp_path, trainer={"accelerator": "cpu", "devices": 2})
    assert (parallel.run_dir / "traffic.csv").read_bytes() == (whole.run_dir / "traffic.csv").read_bytes()


def test_every_logger_gets_the_bytes_of_each_round(tmp_path):
    fitted = federation(tmp_path, callbacks=[TrafficLedger()], logger=CSVLogger(tmp_path))
    fitted.fit(model_of_a_run(), data_of_a_run())
    (path,) = tmp_path.rglob("metrics.csv")
    with path.open() as file:
        rows = [row for row in csv.DictReader(file) if row["FedAvg/round/bytes_up"]]
    size = 2 * 4 * (4 * 5 + 4 + 3 * 4 + 3)  # of two clients, in 32 bits
    found = [(int(row["step"]), *(float(row[f"FedAvg/round/bytes_{way}"]) for way in ("up", "down"))) for row in rows]
    assert found == [(step, size, size) for step in (2, 3, 4, 5)]
