"""The curves of a run in TensorBoard: the same after a kill, in its folder or in that of a user's logger."""

import csv

import pytest
from helpers.runs import Kill, data, federation, model, phases
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

METHODS = ("Local", "FedAvg", "PFL-FB", "PFL-MF")


def fitted(path, *callbacks, ckpt_path=None, **kwargs):
    run = federation(path, callbacks=[*callbacks], **{"logger": True, **kwargs})
    run.fit(model(), data(), ckpt_path=ckpt_path)
    return run


def curves(folder):
    """Steps and values of every scalar, by method and tag.

    In the order of steps: files of the same second and process are read by name, number 10 before number 9.
    """
    found = {}
    for method in METHODS:
        log = EventAccumulator(str(folder / method)).Reload()
        found[method] = {tag: sorted((e.step, e.value) for e in log.Scalars(tag)) for tag in log.Tags()["scalars"]}
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp("whole"))


def test_methods_are_runs_with_the_same_tags_over_their_own_rounds(whole):
    found = curves(whole.run_dir)
    assert [step for step, _ in found["FedAvg"]["reweighted_test/mean"]] == [1, 2, 3, 4]
    assert [step for step, _ in found["PFL-MF"]["reweighted_test/mean"]] == [1]
    means = [row["reweighted_test_mean"] for row in whole.run.rows if row["method"] == "FedAvg"]
    assert [value for _, value in found["FedAvg"]["reweighted_test/mean"]] == pytest.approx(means)
    assert found["PFL-MF"]["mean_gate_weight/global"][0][0] == 1
    assert "mean_gate_weight/global" not in found["FedAvg"]


def test_the_curves_of_a_killed_run_go_on_where_they_were(whole, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path, Kill("on_evaluation_end", 3))
    resumed = curves(fitted(tmp_path, ckpt_path="last").run_dir)
    for method, expected in curves(whole.run_dir).items():
        assert resumed[method].keys() == expected.keys()
        for tag, points in expected.items():
            assert resumed[method][tag] == points, tag


def test_a_user_s_logger_has_the_methods_in_its_folder(tmp_path):
    fitted(tmp_path, phases=phases()[:1], logger=TensorBoardLogger(tmp_path / "mine", name="a", version="b"))
    log = EventAccumulator(str(tmp_path / "mine" / "a" / "b" / "Local")).Reload()
    assert log.Scalars("resources/bytes_up")[0].step == 1


class Statuses(CSVLogger):
    statuses = ()

    def finalize(self, status):
        self.statuses = (*self.statuses, status)


def test_other_loggers_have_every_round_of_a_killed_run_and_know_that_it_failed(tmp_path):
    """As Trainers do: MLflow would show it as running for ever, and CSVLogger writes after a hundred steps."""
    logger = Statuses(tmp_path / "csv", name="", version="")
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path, Kill("on_round_end", 3), logger=logger)
    with (tmp_path / "csv" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["FedAvg/reweighted_test/mean"]] == ["1", "2"]
    assert logger.statuses == ("failed",)


def test_a_run_without_loggers_writes_no_events(tmp_path):
    run = fitted(tmp_path, phases=phases()[:1], logger=False)
    assert not run.run.loggers.take_images and not [*run.run_dir.rglob("events*")]
