import io
import json
import statistics
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from helpers.data import Own, set_up, vectors
from helpers.evaluations import evaluation, mixture, nan
from helpers.reports import csv_rows
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from fedmoe_pl.callbacks import AccuracyMonitor, GateMonitor, PartitionMonitor, ProgressBar, ResultFiles
from fedmoe_pl.callbacks.cluster_monitor import ClusterMonitor
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.logs.loggers import RunLoggers
from fedmoe_pl.logs.summary import format_table, round_row


class FakeProgress:
    total, done = 40.0, 0.0

    def completed(self, states):
        return self.done


class FakeRun(SimpleNamespace):
    """What callbacks read of a run, whose phases are evaluated after every round."""

    def fit(self, *callbacks):
        def call(hook, *arguments):
            for callback in callbacks:
                getattr(callback, hook)(self, *arguments)

        call("on_fit_start")
        for phase in self.phases:
            for round in range(phase.rounds):
                call("on_round_start", phase, round)
                for client in range(2):
                    self.progress.done += phase.work / 2
                    call("on_client_end", phase, round, client)
                self.step += 1
                self.states[phase.name].round = round + 1
                self.rows.append(round_row(phase.evaluation))
                evaluation = replace(phase.evaluation, round=round + 1)
                call("on_evaluation_end", phase, evaluation)
                call("on_round_end", phase, round)
            self.results[phase.evaluation.method] = phase.evaluation
            self.states[phase.name].evaluations = [phase.evaluation]
            call("on_phase_end", phase, phase.evaluation)
        call("on_fit_end")


@pytest.fixture
def run(tmp_path):
    fedavg, pfl_mfe = evaluation(round=2), mixture("PFL MFE", reweighted=(0.8, 0.9, 1.0), round=1)
    loggers = [TensorBoardLogger(tmp_path, name="", version="tb"), CSVLogger(tmp_path, name="", version="csv")]
    model = {"class_path": "fedmoe_pl.PersonalizedMoE", "init_args": {"lr": 0.1, "mixing": "probabilities"}}
    phases = [
        {"name": "FedAvg", "rounds": 2},
        {"name": "PFL MFE", "rounds": 1, "select": {"monitor": "reweighted_test"}},
    ]
    return FakeRun(
        folder=tmp_path,
        loggers=RunLoggers(loggers),
        phases=[
            SimpleNamespace(name="FedAvg", rounds=2, work=10.0, evaluation=fedavg),
            SimpleNamespace(name="PFL MFE", rounds=1, work=20.0, evaluation=pfl_mfe),
        ],
        datamodule=set_up(Own(vectors(24, num_classes=4), num_clients=3, validation_fraction=0.25)),
        rows=[],
        states={"FedAvg": PhaseState({}, {}, flops=2.5e9), "PFL MFE": PhaseState({}, {}, flops=nan)},
        results={},
        step=0,
        seed=3,
        configuration={"hparams": json.dumps({"model": model, "federation": {"phases": phases}}), "objects": ""},
        progress=FakeProgress(),
    )


def events(run, method=""):
    run.loggers.finalize()
    return EventAccumulator(str(run.folder / "tb" / method), size_guidance={"tensors": 0, "images": 0}).Reload()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_bar_counts_work(run, monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    seen = []

    class Watch(ProgressBar):
        def on_client_end(self, *arguments):
            super().on_client_end(*arguments)
            seen.append((self._bar.n, self._bar.total))

    bar = Watch()
    run.fit(bar)
    assert seen == [(n, 40.0) for n in (5.0, 10.0, 15.0, 20.0, 30.0, 40.0)]
    assert bar._bar.desc == "PFL MFE 1/1"
    assert bar._bar.postfix == "reweighted 90.00 % (round 1)"
    assert "100%" in sys.stderr.getvalue()


def test_progress_names_the_round_of_its_accuracy_and_shows_none_of_another_phase(run, monkeypatch):
    """While a round trains, the newest accuracy is that of a round before it."""
    monkeypatch.setattr("sys.stderr", Terminal())
    bar, (fedavg, other) = ProgressBar(), run.phases
    bar.on_fit_start(run)
    bar.on_round_start(run, fedavg, 0)
    bar.on_evaluation_end(run, fedavg, replace(fedavg.evaluation, round=1))
    bar.on_round_start(run, fedavg, 1)
    assert (bar._bar.desc, bar._bar.postfix) == ("FedAvg 2/2", "reweighted 70.00 % (round 1)")
    bar.on_evaluation_end(run, other, other.evaluation)  # as before the only round of a phase, after fewer epochs
    assert (bar._bar.desc, bar._bar.postfix) == ("FedAvg 2/2", "reweighted 70.00 % (round 1)")


def test_progress_without_a_terminal_is_one_line_per_phase_and_one_a_minute(run, monkeypatch, capsys):
    run.fit(ProgressBar())
    captured = capsys.readouterr()
    of_phases = ("FedAvg: 2 rounds, reweighted 70.00 %, global 60.00 % (round 2)",)
    of_phases += ("PFL MFE: 1 round, reweighted 90.00 %, global 60.00 % (round 1)",)
    assert captured.out == ""
    assert captured.err == f"[ 50% 00:00<00:00] {of_phases[0]}\n[100% 00:00<00:00] {of_phases[1]}\n"
    clock = iter(range(0, 10**6, 25))
    monkeypatch.setattr("fedmoe_pl.callbacks.progress_bar.time.monotonic", lambda: next(clock))
    run.progress.done = 0.0
    run.fit(ProgressBar())
    lines = [line.split("] ")[1] for line in capsys.readouterr().err.splitlines()]
    assert {"FedAvg: round 2/2, reweighted 70.00 %, global 60.00 % (round 1)", of_phases[0]} <= {*lines}


def test_progress_says_how_many_rounds_a_phase_had(run, capsys):
    """FedAvg may have two rounds and ends after one; the other phase's result comes from a checkpoint."""
    bar, (fedavg, given) = ProgressBar(), run.phases
    bar.on_fit_start(run)
    bar.on_round_start(run, fedavg, 0)
    run.states["FedAvg"].round, run.states["FedAvg"].stopped = 1, True
    bar.on_phase_end(run, fedavg, None)
    run.states["PFL MFE"].round, run.states["PFL MFE"].given_round = 1, 7
    bar.on_phase_end(run, given, None)
    bar.on_round_start(run, given, 0)  # newcomers train what clients keep, beside a given server
    bar.on_phase_end(run, given, None)
    lines = [line.split("] ")[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["FedAvg: 1 round", "PFL MFE: given checkpoint", "PFL MFE: 1 round"]


def test_the_end_of_a_run_names_the_next_commands_also_where_a_name_cannot_be_printed(run, monkeypatch):
    run.results["опыт"] = replace(run.phases[0].evaluation, method="опыт")
    run.folder /= "my run"
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    ResultFiles().on_fit_end(run)
    text = out.buffer.getvalue().decode()  # pyright: ignore[reportAttributeAccessIssue]
    assert r"\u043e\u043f\u044b\u0442" in text
    next_ones = f"Next:  fedmoe report '{run.folder}'\n       tensorboard --logdir {run.folder.parent}/tb\n"
    assert text.endswith(f"Files: {run.folder}\n{next_ones}")


def test_result_files(run, capsys):
    run.fit(ResultFiles())

    def rows(name):
        return csv_rows(run.folder / name)

    def methods(name):
        return [row["method"] for row in rows(name)]

    assert methods("rounds.csv") == ["FedAvg", "FedAvg", "PFL MFE"]
    assert methods("clients.csv") == ["FedAvg"] * 3 + ["PFL MFE"] * 3
    assert methods("summary.csv") == ["FedAvg", "PFL MFE"]
    assert methods("gate_weights.csv") == ["PFL MFE"] * 3
    assert format_table(run.results.values()) in capsys.readouterr().out
    columns = ["client", "train", "validation", "test", "class_0", "class_1", "class_2", "class_3"]
    counts = run.datamodule.class_counts().long()
    for client, row in enumerate(rows("partition.csv")):
        assert [*row] == columns
        assert [int(value) for value in row.values()] == [client, 6, 2, 0, *counts[client].tolist()]
    first, second, third = ([*row.values()] for row in rows("gate_weights.csv"))
    assert first == ["PFL MFE", "after local training", "0", "global", "0.25", "0.625", "", ""]
    assert (second[4:], third[2]) == (["", "", "0.75", ""], "2")


def scalars(log):
    return {tag: [(e.step, round(e.value, 6)) for e in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


def test_accuracies_in_tensorboard_and_in_other_loggers(run):
    """Each method is a run with the same tags; the step is the round of its own phase."""
    run.states["FedAvg"].traffic["bytes_up"] = 70
    run.states["FedAvg"].epsilon, run.states["PFL MFE"].sample_epsilon = 1.5, 0.25
    run.fit(AccuracyMonitor())
    fedavg, mixed, whole = scalars(events(run, "FedAvg")), scalars(events(run, "PFL MFE")), events(run)
    assert fedavg["reweighted_test/mean"] == [(1, 0.7), (2, 0.7)]
    assert fedavg["reweighted_test/worst_tenth"] == [(1, 0.5), (2, 0.5)]
    assert mixed["reweighted_test/mean"] == [(1, 0.9)]
    assert mixed["result/global_test"] == [(1, 0.6)] and mixed["result/reweighted_test"] == [(1, 0.9)]
    assert not any("validation" in tag or "local" in tag for tag in mixed)
    assert fedavg["resources/flops"] == [(1, 2.5e9), (2, 2.5e9)]
    assert fedavg["resources/bytes_up"] == [(1, 70), (2, 70)]
    assert "resources/flops" not in mixed, "nobody could count them"
    assert fedavg["resources/epsilon"] == [(1, 1.5), (2, 1.5)] and mixed["resources/sample_epsilon"] == [(1, 0.25)]
    assert "resources/sample_epsilon" not in fedavg and "resources/epsilon" not in mixed
    assert min(fedavg) == "global_test/mean", "what TensorBoard shows first"
    assert whole.Tags()["scalars"] == []
    assert [e.step for e in whole.Images("sorted_accuracies")] == [2, 3]
    table = make_ndarray(whole.Tensors("table/text_summary")[0].tensor_proto).item().decode()
    assert table == f"```\n{format_table(run.results.values())}\n```"
    rows = csv_rows(run.folder / "csv" / "metrics.csv")
    assert float(rows[0]["FedAvg/reweighted_test/mean"]) == pytest.approx(0.7)
    assert rows[0]["step"] == "1"


def test_chosen_clients_have_curves_and_what_is_evaluated_before_the_first_round_has_cost_nothing(run):
    fedavg = run.phases[0]
    for round in range(2):
        run.states["FedAvg"].round = round
        AccuracyMonitor([0, 2]).on_evaluation_end(run, fedavg, replace(fedavg.evaluation, round=round))
    found = scalars(events(run, "FedAvg"))
    of_clients = {tag: points for tag, points in found.items() if tag.startswith("reweighted_test/client")}
    assert of_clients == {
        "reweighted_test/client_000": [(0, 0.5), (1, 0.5)],
        "reweighted_test/client_002": [(0, 0.9), (1, 0.9)],
    }
    assert found["resources/flops"] == [(1, 2.5e9)]


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["FedAvg", "PFL MFE"])
def test_the_page_of_hyperparameters_has_the_columns_of_all_methods_and_says_which_differ(method, run):
    """TensorBoard reads the columns of one row only: FedAvg has no ``monitor``; a boolean is no number."""
    from tensorboard.plugins.hparams import metadata

    tree = json.loads(run.configuration["hparams"])
    tree["model"]["init_args"]["channels_last"] = True
    run.configuration["hparams"] = json.dumps(tree)
    run.fit(AccuracyMonitor())
    contents = events(run, method).summary_metadata
    experiment = metadata.parse_experiment_plugin_data(contents["_hparams_/experiment"].plugin_data.content)
    differs = {column.name: column.differs for column in experiment.hparam_infos}
    others = dict.fromkeys(("method", "model", "mixing", "monitor", "seed", "channels_last"), False)
    assert differs == others | {"rounds": True}
    assert {metric.display_name for metric in experiment.metric_infos} == {"reweighted_test", "global_test"}
    session = metadata.parse_session_start_info_plugin_data(
        contents["_hparams_/session_start_info"].plugin_data.content
    )
    assert session.hparams["channels_last"].bool_value is True


class LoggerOfPictures(CSVLogger):
    """A user's logger with a ``log_image`` like that of ``WandbLogger``."""

    pictures = ()

    def log_image(self, key, images, step=None):
        self.pictures = (*self.pictures, (key, images[0].shape[1:], step))


def test_every_logger_with_log_image_gets_the_pictures(run):
    logger = LoggerOfPictures(run.folder, name="", version="own")
    run.loggers = RunLoggers([logger])
    run.fit(AccuracyMonitor(), GateMonitor())
    of_method = ("PFL_MFE/mean_gate_weight/by_client_and_class", (700, 3), 1)
    assert logger.pictures == (*(("sorted_accuracies", (700, 3), step) for step in (2, 3)), of_method)


def test_gate_weights_in_tensorboard(run):
    run.fit(GateMonitor(max_clients=2))
    log = events(run, "PFL MFE")
    tags = [tag for tag in log.Tags()["tensors"] if tag.startswith("weight_of_samples")]
    assert tags == ["weight_of_samples/client_000", "weight_of_samples/client_001"]
    (event,) = log.Tensors("weight_of_samples/client_000")
    left, right, counts = make_ndarray(event.tensor_proto).T
    assert event.step == 1
    assert (left[0], right[-1], len(counts)) == (0.0, 1.0, 30)
    assert {int(i): counts[i] for i in counts.nonzero()[0]} == {0: 1, 7: 1, 15: 1, 29: 1}  # 0, 0.25, 0.5 and 1
    (event,) = log.Tensors("mean_gate_weight/of_clients")
    assert make_ndarray(event.tensor_proto)[:, 2].sum() == 3
    weights = scalars(log)
    mean = round((0.4375 + 0.75 + 0.15) / 3, 6)
    assert weights["mean_gate_weight/global"] == [(1, mean)]
    assert weights["mean_gate_weight/local"] == [(1, round(1 - mean, 6))]
    assert weights["mean_gate_weight/std_of_global"] == [(1, round(statistics.pstdev((0.4375, 0.75, 0.15)), 6))]
    (image,) = log.Images("mean_gate_weight/by_client_and_class")
    assert image.width == 700
    assert not (run.folder / "tb" / "FedAvg").exists(), "it has no gate"


def test_loggers_get_the_picks_of_each_round(run):
    state, monitor = run.states["FedAvg"], ClusterMonitor()
    for round, picks in enumerate([[[2, 1]], [[2, 1], [0, 3]]]):
        state.server["clusters/picks"], state.round = torch.tensor(picks), round + 1
        monitor.on_server_update(run, run.phases[0], round)
    picked = {"picked/cluster_0": [(1, 2), (2, 0)], "picked/cluster_1": [(1, 1), (2, 3)]}
    assert scalars(events(run, "FedAvg")) == picked


def test_partition_in_tensorboard_once(run):
    PartitionMonitor().on_fit_start(run)
    run.step = 2
    PartitionMonitor().on_fit_start(run)
    log = events(run)
    (image,) = log.Images("partition")
    assert image.width == 700
    (text,) = log.Tensors("partition/text_summary")
    assert b"3 clients, 4 classes" in make_ndarray(text.tensor_proto).item()
