"""What loggers show of a run, also of one that was killed and resumed: every curve and picture once."""

import re
import time
from functools import partial

import pytest
import torch
from helpers import blobs, mixture
from helpers.configurations import REPOSITORY
from helpers.reports import csv_rows, leave_pictures_blank
from helpers.runs import Kill, federation
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing import event_accumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator

from fedmoe_pl import Evaluate, Phase, Select, Train
from fedmoe_pl.algorithms import EpsilonGreedyIFCA, FedAvg, Local
from fedmoe_pl.logs.loggers import RunLoggers
from fedmoe_pl.models import ClusteredMoE, GlobalOnly, LinearGate, LocalOnly

METHODS = ("", "Local", "FedAvg", "IFCA")


def phases():
    torch.manual_seed(0)
    clusters = ClusteredMoE(torch.nn.Linear(5, 3), 2, optimizer=partial(torch.optim.SGD, lr=0.1)).double()
    return [
        Phase("Local", Local(), gate=LocalOnly(), train=Train(max_epochs=2), evaluate=Evaluate(every_n_epochs=1)),
        Phase("FedAvg", FedAvg("global_expert.*"), rounds=3, gate=LinearGate(5), select=Select("global_test")),
        Phase("IFCA", EpsilonGreedyIFCA(), rounds=2, model=clusters, gate=GlobalOnly(), start="initial"),
    ]


def fitted(path, *callbacks, ckpt_path=None, phases=phases, logger=True):
    trainer = {"accelerator": "cpu", "max_epochs": 1}
    run = federation(path, phases(), callbacks=[*callbacks], logger=logger, trainer=trainer)
    run.fit(mixture(), blobs(), ckpt_path=ckpt_path)
    return run


def shown(path):
    """The steps of every scalar, picture, histogram and text, by method and tag, as TensorBoard reads them."""
    found = {}
    for method in METHODS:
        log = EventAccumulator(str(path / "federation/version_0" / method), {"tensors": 0}).Reload()
        found |= {(method, tag): [event.step for event in log.Tensors(tag)] for tag in log.Tags()["tensors"]}
    return found


@pytest.fixture(autouse=True, scope="module")
def blank_pictures():
    with pytest.MonkeyPatch.context() as patch:
        leave_pictures_blank(patch)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("whole")
    run = fitted(path)
    log = event_accumulator.EventAccumulator(str(run.run_dir / "FedAvg")).Reload()
    means = [row["reweighted_test_mean"] for row in run.run.rows if row["method"] == "FedAvg"]
    assert [event.value for event in log.Scalars("reweighted_test/mean")] == pytest.approx(means)
    log = event_accumulator.EventAccumulator(str(run.run_dir / "IFCA")).Reload()
    picks = [[event.value for event in log.Scalars(f"picked/cluster_{cluster}")] for cluster in (0, 1)]
    assert picks == run.run.states["IFCA"].server["clusters/picks"].T.tolist()
    return shown(path)


@pytest.fixture
def kill(tmp_path, monkeypatch):
    """Begins the run or goes on with it, until it is killed: what is not flushed then is lost."""

    def killed(hook, n, ckpt_path="last"):
        with monkeypatch.context() as patch:
            patch.setattr(RunLoggers, "finalize", lambda loggers, status="success": None)
            with pytest.raises(KeyboardInterrupt):
                fitted(tmp_path, Kill(hook, n), ckpt_path=ckpt_path)
        now = time.time
        monkeypatch.setattr(time, "time", lambda: now() + 10)  # TensorBoard reads files by the second of their names

    return killed


def test_the_whole_run_has_curves_pictures_histograms_and_texts(whole):
    expected = {
        ("", "partition"): [0],
        ("", "sorted_accuracies"): [1, 4, 6],
        ("Local", "reweighted_test/mean"): [0, 1, 2],
        ("FedAvg", "reweighted_test/mean"): [1, 2, 3],
        ("FedAvg", "mean_gate_weight/of_clients"): [1, 2, 3],
        ("IFCA", "picked/cluster_0"): [1, 2],
        ("IFCA", "picked/by_client"): [2],
    }
    assert expected.items() <= whole.items()
    assert ("Local", "mean_gate_weight/of_clients") not in whole


def test_the_page_lists_every_tag(whole):
    """Those of a run, and every name that a callback gives to a picture, histogram or text."""
    page = (
        (REPOSITORY / "docs/guide/results.md").read_text().partition("## Tags in TensorBoard")[2].partition("\n## ")[0]
    )
    rows = [re.findall(r"`([^`]+)`", line.split("|")[1]) for line in page.splitlines() if line.startswith("| `")]
    listed = [tag for tags in rows for tag in tags]
    patterns = [re.sub("<[a-z ]+>", "[^/]+", re.escape(tag).replace("\\ ", " ")) for tag in listed]
    tags = {tag.removesuffix("/text_summary") for _, tag in whole}
    assert [tag for tag in tags if not any(re.fullmatch(pattern, tag) for pattern in patterns)] == []
    calls = r"(?:log_figure\(run|log_histogram\(|log_text\(|log_image\()(?:, )?\"([^\"{]+)\""
    for path in (REPOSITORY / "fedmoe_pl/callbacks").glob("*.py"):
        assert {*re.findall(calls, path.read_text())} <= {*listed}, path


@pytest.mark.slow
def test_a_run_killed_again_and_again_shows_everything_once_at_its_step(whole, kill, tmp_path):
    kill("on_evaluation_end", 1, None)
    kill("on_phase_end", 1)
    kill("on_phase_end", 1)
    kill("on_round_end", 2)
    fitted(tmp_path, ckpt_path="last")
    assert shown(tmp_path) == whole


def test_a_user_s_logger_has_the_methods_in_its_folder(tmp_path):
    fitted(tmp_path, phases=lambda: phases()[:1], logger=TensorBoardLogger(tmp_path / "mine", name="a", version="b"))
    log = event_accumulator.EventAccumulator(str(tmp_path / "mine" / "a" / "b" / "Local")).Reload()
    assert log.Scalars("resources/bytes_up")


@pytest.fixture
def a_later_second(monkeypatch):
    """Lets what follows its call happen later, because TensorBoard reads files by the second of their names."""
    now = time.time
    return lambda: monkeypatch.setattr(time, "time", lambda: now() + 10)


def test_a_callback_that_logs_to_a_finished_method_keeps_its_curves(tmp_path, a_later_second):
    loggers = RunLoggers([TensorBoardLogger(tmp_path, name="", version="")])
    for step in (1, 2):
        loggers.log_scalars("FedAvg", {"own": 1.0}, step)
    loggers.close("FedAvg")
    a_later_second()
    loggers.log_scalars("FedAvg", {"late": 1.0}, 2)
    loggers.finalize()
    log = event_accumulator.EventAccumulator(str(tmp_path / "FedAvg")).Reload()
    assert [[event.step for event in log.Scalars(tag)] for tag in ("own", "late")] == [[1, 2], [2]]


def of_fedavg(path):
    log = event_accumulator.EventAccumulator(str(path / "FedAvg")).Reload()
    return [event.step for event in log.Scalars("reweighted_test/mean")]


def test_a_run_goes_on_in_the_same_process_with_the_same_logger(tmp_path, a_later_second):
    given = {"phases": lambda: phases()[1:2], "logger": TensorBoardLogger(tmp_path / "mine", name="", version="")}
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path, Kill("on_round_end", 2), **given)
    a_later_second()
    fitted(tmp_path, ckpt_path="last", **given)
    assert of_fedavg(tmp_path / "mine") == [1, 2, 3]


def test_new_clients_do_not_replace_what_a_given_logger_has_of_the_federation(tmp_path, a_later_second):
    board, table = TensorBoardLogger(tmp_path / "mine", name="", version=""), CSVLogger(tmp_path / "csv", "", "")
    run = fitted(tmp_path, phases=lambda: phases()[1:2], logger=[board, table])
    a_later_second()
    run.personalize(mixture(), blobs((9, 6)), rounds=2)
    assert of_fedavg(tmp_path / "mine") == [1, 2, 3]
    assert len(of_fedavg(tmp_path / "mine" / "new_clients")) == 1
    for folder in ("mine", "mine/new_clients"):
        log = event_accumulator.EventAccumulator(str(tmp_path / folder)).Reload()
        assert len(log.Images("partition")) == 1
    rows = csv_rows(tmp_path / "csv" / "metrics.csv")
    assert len([row for row in rows if row["FedAvg/reweighted_test/mean"]]) == 3
    assert len([row for row in rows if row["new_clients/FedAvg/reweighted_test/mean"]]) == 1


class Statuses(CSVLogger):
    statuses = ()

    def finalize(self, status):
        self.statuses = (*self.statuses, status)


def test_other_loggers_have_every_round_of_a_killed_run_and_know_that_it_failed(tmp_path):
    """As Trainers do: MLflow would show it as running for ever, and CSVLogger writes after a hundred steps."""
    logger = Statuses(tmp_path / "csv", name="", version="")
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path, Kill("on_round_end", 3), logger=logger)
    rows = csv_rows(tmp_path / "csv" / "metrics.csv")
    assert [row["step"] for row in rows if row["FedAvg/reweighted_test/mean"]] == ["1", "2"]
    assert logger.statuses == ("failed",)


class Full(CSVLogger):
    def finalize(self, status):
        raise OSError("No space left on device")


def test_what_ended_a_run_is_said_even_if_a_logger_cannot_be_closed(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path, Kill("on_round_end", 3), logger=Full(tmp_path / "csv", name="", version=""))


def test_a_run_without_loggers_writes_no_events(tmp_path):
    run = fitted(tmp_path, phases=lambda: phases()[:1], logger=False)
    assert not run.run.loggers.take_images and not [*run.run_dir.rglob("events*")]
