"""``traffic.csv``: its rows, and the same file after a kill and in workers; that of every method is in test_audit."""

from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import run
from helpers.methods import METHODS, data, ledger
from helpers.reports import csv_rows
from helpers.runs import Kill, federation
from helpers.runs import data as data_of_a_run
from helpers.runs import model as model_of_a_run
from lightning.pytorch.loggers import CSVLogger

from fedmoe_pl.callbacks import TrafficLedger
from fedmoe_pl.callbacks.traffic_ledger import COLUMNS
from fedmoe_pl.checkpoints.phase_state import PhaseState


def test_a_row_says_what_was_sent(tmp_path):
    method = METHODS["FedPer"]
    every = ledger(run(method.phases(), method.model(), data(), tmp_path, callbacks=[TrafficLedger()]))
    common = {"phase": "FedPer", "round": "1", "client": every[0]["client"]}
    rows = [row for row in every if row.items() >= common.items()]
    weight = {"tensor": "local_expert.extractor.1.weight", "shape": "6x5", "dtype": "float64", "bytes": "240"}
    bias = {"tensor": "local_expert.extractor.1.bias", "shape": "6", "dtype": "float64", "bytes": "48"}
    number = {"tensor": "(weight)", "shape": "()", "dtype": "float", "bytes": "0"}
    sent = [("down", weight), ("down", bias), ("up", weight), ("up", bias), ("up", number)]
    assert rows == [{**common, "direction": direction, **row} for direction, row in sent]
    assert [*dict.fromkeys(row["round"] for row in every)] == ["1", "2"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    return fitted(path, logger=CSVLogger(path))


def fitted(path, *callbacks, ckpt_path=None, **kwargs):
    run = federation(path, callbacks=[*callbacks, TrafficLedger()], **kwargs)
    run.fit(model_of_a_run(), data_of_a_run(), ckpt_path=ckpt_path)
    return run


@pytest.mark.slow
@pytest.mark.parametrize(("hook", "n", "half_a_row"), [("on_transfers", 3, ""), ("on_round_end", 3, "FedAvg,1,do")])
def test_the_file_of_a_killed_run_goes_on_where_it_was(hook, n, half_a_row, whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path, Kill(hook, n))
    (path,) = tmp_path.rglob("traffic.csv")
    with path.open("a") as file:
        file.write(half_a_row)
    assert fitted(tmp_path, ckpt_path="last").run_dir == path.parent
    assert path.read_bytes() == (whole.run_dir / "traffic.csv").read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("before", [False, True])
def test_a_ledger_that_missed_rounds_says_how_much(before, tmp_path):
    """It is there from the first round on or not, and not in the middle."""

    def stopped(n, *callbacks, **kwargs):
        run = federation(tmp_path, callbacks=[Kill("on_round_end", n), *callbacks])
        with pytest.raises(KeyboardInterrupt):
            run.fit(model_of_a_run(), data_of_a_run(), **kwargs)
        return run.run.states["FedAvg"].traffic["bytes_up"]

    both_ways = 2 * stopped(2, *([TrafficLedger()] if before else []))
    missed = 2 * stopped(1, ckpt_path="last") - (both_ways if before else 0)
    sentence = rf"^TrafficLedger: traffic\.csv lacks {missed:,} bytes of 'FedAvg', which were sent in rounds without"
    with pytest.warns(match=sentence):
        fitted(tmp_path, ckpt_path="last")


def test_what_a_file_has_is_not_missing(tmp_path):
    rows = ["A,1,down,0,w,5,float64,40", "A,1,up,0,w,5,float64,40", "B,1,up,0,w,5,float64,40"]
    (tmp_path / "traffic.csv").write_text("\n".join([",".join(COLUMNS), *rows, ""]))
    states = {name: PhaseState({}, {}, round=2) for name in "AB"}
    states["A"].traffic |= {"bytes_down": 1040, "bytes_up": 440}
    states["B"].traffic["bytes_up"] = 40
    with pytest.warns(match=r"^TrafficLedger: traffic\.csv lacks 1,400 bytes of 'A', which were sent in rounds"):
        TrafficLedger().on_fit_start(SimpleNamespace(folder=tmp_path, states=states))


def test_every_logger_gets_the_bytes_of_each_round(whole):
    tag = "FedAvg/traffic_of_round/bytes"
    rows = [row for row in csv_rows(Path(whole.run.loggers.all[0].log_dir) / "metrics.csv") if row[f"{tag}_up"]]
    size = 2 * 4 * (4 * 5 + 4 + 3 * 4 + 3)  # of two clients, in 32 bits
    found = [(int(row["step"]), float(row[f"{tag}_up"]), float(row[f"{tag}_down"])) for row in rows]
    assert found == [(step, size, size) for step in (1, 2, 3, 4)]
