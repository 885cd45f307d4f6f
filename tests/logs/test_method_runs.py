"""A run of each method in MLflow and in Weights & Biases, read from their files and compared with what ``fit`` says."""

import struct

import pytest
from helpers.reports import leave_pictures_blank
from helpers.runs import Kill, data, federation, model, phases
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger

METHODS = ["Local", "FedAvg", "PFL-FB", "PFL-MF"]
pytestmark = pytest.mark.filterwarnings("ignore")  # of MLflow and Weights & Biases themselves


@pytest.fixture(autouse=True)
def blank_pictures(monkeypatch):
    leave_pictures_blank(monkeypatch)


@pytest.fixture
def client(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a data base takes seconds to make
    return mlflow.MlflowClient(f"file:{tmp_path}/mlruns")


def fit(path, logger, *callbacks, **kwargs):
    return federation(path, logger=logger, callbacks=[*callbacks]).fit(model(), data(), **kwargs)


def of_mlflow(path, **kwargs):
    return MLFlowLogger("digits", tracking_uri=f"file:{path}/mlruns", **kwargs)


def runs_of(client, logger):
    """The runs below the logger's, by name; in the order in which they began."""
    runs = client.search_runs([logger.experiment_id], order_by=["attributes.start_time"])
    below = [run for run in runs if run.data.tags.get("mlflow.parentRunId") == logger.run_id]
    names = [run.info.run_name for run in below]
    assert len({*names}) == len(names)
    return dict(zip(names, below, strict=True))


@pytest.mark.slow
def test_each_method_is_a_run_of_mlflow_with_the_same_names(tmp_path, client):
    logger = of_mlflow(tmp_path, tags={"team": "ours"})
    results = fit(tmp_path, logger)
    runs = runs_of(client, logger)
    assert [*runs] == METHODS
    for method, run in runs.items():
        for metric in ("reweighted_test", "global_test"):
            expected = results[method].spread(metric).mean
            assert run.data.metrics[f"result/{metric}"] == pytest.approx(expected)
            assert run.data.metrics[f"{metric}/worst_tenth"] == pytest.approx(
                results[method].spread(metric).worst_tenth
            )
        assert (run.data.params["method"], run.data.tags["team"], run.info.status) == (method, "ours", "FINISHED")
    assert runs["FedAvg"].data.params["rounds"] == "4" and runs["PFL-MF"].data.params["max_epochs"] == "3"
    history = client.get_metric_history(runs["FedAvg"].info.run_id, "reweighted_test/mean")
    assert {point.step for point in history} == {1, 2, 3, 4}
    of_all = client.get_run(logger.run_id)
    assert not of_all.data.metrics and of_all.data.params["FedAvg.rounds"] == "4"
    assert {"table.txt", "partition.txt"} <= {file.path for file in client.list_artifacts(logger.run_id)}


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_the_runs_of_mlflow(tmp_path, client):
    logger = of_mlflow(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path, logger, Kill("on_round_end", 4))  # of FedAvg's rounds, the third
    assert {name: run.info.status for name, run in runs_of(client, logger).items()} == {
        "Local": "FINISHED",
        "FedAvg": "FAILED",
    }
    again = of_mlflow(tmp_path, run_id=logger.run_id)
    fit(tmp_path, again, ckpt_path="last")
    runs = runs_of(client, again)
    assert [*runs] == METHODS and {run.info.status for run in runs.values()} == {"FINISHED"}
    history = client.get_metric_history(runs["FedAvg"].info.run_id, "reweighted_test/mean")
    assert {point.step for point in history} == {1, 2, 3, 4}


@pytest.mark.slow
def test_a_run_that_is_continued_with_more_rounds_goes_on_in_mlflow(tmp_path, client):
    """MLflow refuses other values of parameters; those of a new phase are added."""
    local, new, *_ = phases()
    local.rounds, new.rounds = 2, 1
    logger = of_mlflow(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path, [local], logger=logger, callbacks=[Kill("on_round_end", 1)]).fit(model(), data())
    again, local.rounds = of_mlflow(tmp_path, run_id=logger.run_id), 3
    federation(tmp_path, [local, new], logger=again).fit(model(), data(), ckpt_path="last")
    of_all = client.get_run(logger.run_id).data.params
    assert (of_all["Local.rounds"], of_all["FedAvg.rounds"]) == ("2", "1")


@pytest.mark.slow
def test_new_clients_have_runs_of_mlflow_of_their_own(tmp_path, client):
    logger = of_mlflow(tmp_path)
    run = federation(tmp_path, phases()[:2], logger=logger)
    results = run.fit(model(), data())
    run.personalize(model(), data(), rounds=1)
    runs = runs_of(client, logger)
    assert [*runs] == ["Local", "FedAvg", "new_clients/Local", "new_clients/FedAvg"]
    expected = results["FedAvg"].spread("global_test").mean
    assert runs["FedAvg"].data.metrics["result/global_test"] == pytest.approx(expected)
    files = {file.path for file in client.list_artifacts(logger.run_id)}
    assert "table.txt" in files and "new_clients" in files


def records_of_wandb(path):
    """The records of a run's file: a log of LevelDB, in blocks of 32 KiB, after 7 bytes of its own."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportMissingImports]

    content, place, whole = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if place % 32768 > 32768 - 7:  # no header fits into what is left of the block
            place += -place % 32768
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        whole += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(whole)
            whole = b""


@pytest.mark.slow
def test_each_method_is_a_run_of_weights_and_biases_in_the_same_group(tmp_path):
    wandb = pytest.importorskip("wandb")
    results = fit(tmp_path, WandbLogger(name="mine", project="digits", offline=True, save_dir=tmp_path))
    assert wandb.run.name == "mine", "of the whole run, as before"
    wandb.teardown()  # `finish` may return before the files are written
    found = {}
    for path in tmp_path.glob("wandb/offline-run-*/*.wandb"):
        run, values = None, {}
        for record in records_of_wandb(path):
            if record.HasField("run"):
                run = record.run
            for item in record.history.item:
                values[item.key or "/".join(item.nested_key)] = item.value_json
        found[run.display_name] = run.run_group, values
    assert {*found} == {"mine", *METHODS}
    for method in METHODS:
        group, values = found[method]
        assert group == "mine"
        assert float(values["result/reweighted_test"]) == pytest.approx(results[method].spread("reweighted_test").mean)
