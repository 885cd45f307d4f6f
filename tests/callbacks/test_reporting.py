import csv
import io
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

from fedmoe_pl.callbacks import AccuracyMonitor, GateMonitor, PartitionMonitor, ProgressBar, ResultFiles, partition
from fedmoe_pl.callbacks.figures import figure_pixels, gate_weight_figure, sorted_accuracy_figure
from fedmoe_pl.rounds.evaluation import ClientEvaluation, Evaluation
from fedmoe_pl.rounds.results import (
    client_rows,
    format_table,
    mean_gate_weight_by_class,
    round_row,
    summary_row,
    write_csv,
)
from fedmoe_pl.rounds.state import PhaseState

nan = math.nan


def evaluation(method="FedAvg", local=(0.5, 0.7, 0.9), held_out=nan, gates=None, **changes):
    """An evaluation of len(local) clients with a global test accuracy of 0.6 each."""
    gates = gates or [(None, None)] * len(local)
    clients = [
        ClientEvaluation(i, 10 + i, accuracy, held_out, 0.6, nan, *gate)
        for i, (accuracy, gate) in enumerate(zip(local, gates, strict=True))
    ]
    facts = {"round": 4, "model": "global expert", "moment": "after aggregation", "selection": "last round"}
    return Evaluation(method, clients=clients, **(facts | changes))


def gate(weights, labels):
    first = torch.tensor(weights)
    return torch.stack([first, 1 - first], dim=1), torch.tensor(labels)


GATES = [gate([0.0, 0.5, 1.0, 0.25], [0, 0, 1, 1]), gate([0.75], [2]), gate([0.1, 0.2], [1, 1])]


def mixture(method="PFL-MFE", **changes):
    return evaluation(method, gates=GATES, model="mixture", moment="after local training", **changes)


class FakeFederation(SimpleNamespace):
    """What callbacks read of a federation, and a run of phases that are evaluated after every round."""

    def run(self, *callbacks):
        def call(hook, *arguments):
            for callback in callbacks:
                getattr(callback, hook)(self, *arguments)

        call("on_fit_start")
        for phase in self.phases:
            for round in range(phase.rounds):
                call("on_round_start", phase, round)
                for client in range(2):
                    self.completed_work += phase.work / 2
                    call("on_client_end", phase, round, client)
                self.step += 1
                self.rows.append(round_row(phase.evaluation))
                call("on_evaluation_end", phase, phase.evaluation)
                call("on_round_end", phase, round)
            self.results[phase.evaluation.method] = phase.evaluation
            call("on_phase_end", phase, phase.evaluation)
        call("on_fit_end")


@pytest.fixture
def federation(tmp_path):
    fedavg, pfl_mfe = evaluation(), mixture("PFL MFE", local=(0.8, 0.9, 1.0), round=1)
    return FakeFederation(
        run_dir=tmp_path,
        loggers=[TensorBoardLogger(tmp_path, name="", version="tb"), CSVLogger(tmp_path, name="", version="csv")],
        phases=[
            SimpleNamespace(name="FedAvg", rounds=2, work=10.0, evaluation=fedavg),
            SimpleNamespace(name="PFL MFE", rounds=1, work=20.0, evaluation=pfl_mfe),
        ],
        datamodule=SimpleNamespace(num_classes=4),
        rows=[],
        states={"FedAvg": PhaseState({}, {}, flops=2.5e9), "PFL MFE": PhaseState({}, {}, flops=nan)},
        results={},
        step=0,
        hparams={"seed_everything": 3, "model": {"class_path": "PersonalizedMoE", "init_args": {"lr": 0.1}}},
        completed_work=0.0,
        total_work=40.0,
    )


def events(federation):
    for logger in federation.loggers:
        logger.finalize("success")
    return EventAccumulator(str(federation.run_dir / "tb"), size_guidance={"tensors": 0, "images": 0}).Reload()


def test_round_row_names_what_was_evaluated_and_spreads_over_clients():
    row = round_row(evaluation(selection="best round by global_test"))
    assert {k: row[k] for k in ("method", "round", "model", "clients", "moment", "selection")} == {
        "method": "FedAvg",
        "round": 4,
        "model": "global expert",
        "clients": "all 3",
        "moment": "after aggregation",
        "selection": "best round by global_test",
    }
    assert row["local_test_mean"] == pytest.approx(0.7)
    assert row["local_test_std"] == pytest.approx(math.sqrt(0.08 / 3))
    assert row["local_test_worst_tenth"] == 0.5
    assert math.isnan(row["validation_mean"])


def test_client_rows_and_summary_row_have_the_mean_gate_weight():
    rows = client_rows(mixture())
    assert [row["mean_gate_weight"] for row in rows] == pytest.approx([0.4375, 0.75, 0.15])
    assert [row["n_train"] for row in rows] == [10, 11, 12]
    assert summary_row(mixture())["mean_gate_weight_mean"] == pytest.approx((0.4375 + 0.75 + 0.15) / 3)
    assert math.isnan(summary_row(evaluation())["mean_gate_weight_mean"])


def test_csv_keeps_every_digit_and_leaves_nan_empty(tmp_path):
    rows = [{"method": "a, b", "round": 1, "x": 1 / 3}, {"method": "c", "round": 2, "x": nan}]
    write_csv(tmp_path / "a.csv", rows)
    write_csv(tmp_path / "b.csv", rows)
    assert (tmp_path / "a.csv").read_bytes() == (tmp_path / "b.csv").read_bytes()
    with (tmp_path / "a.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert float(read[0]["x"]) == 1 / 3
    assert read[0]["method"] == "a, b"
    assert read[1] == {"method": "c", "round": "2", "x": ""}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "b.csv"]


def test_failed_csv_leaves_the_old_file(tmp_path):
    write_csv(tmp_path / "a.csv", [{"x": 1}])

    class Unprintable:
        def __str__(self):
            raise RuntimeError("no text")

    with pytest.raises(RuntimeError):
        write_csv(tmp_path / "a.csv", [{"x": Unprintable()}])
    assert (tmp_path / "a.csv").read_text() == "x\n1\n"


def test_table():
    evaluations = [evaluation(), mixture(round=1, local=(0.91, 0.93, 1.0))]
    expected = """\
                  local test                    global test
method       mean     std worst tenth      mean     std worst tenth
-------------------------------------------------------------------
FedAvg      70.00   16.33       50.00     60.00    0.00       60.00
PFL-MFE     94.67    3.86       91.00     60.00    0.00       60.00

Accuracy in percent over all 3 clients: mean, standard deviation, mean of the worst tenth.
local test: accuracy per class on the global test set, weighted with the client's class shares
global test: accuracy on the global test set, the same for all clients
FedAvg: global expert, after aggregation, last round (round 4)
PFL-MFE: mixture, after local training, last round (round 1)"""
    assert format_table(evaluations) == expected


def test_table_has_held_out_columns_only_where_present():
    assert "held out" not in format_table([evaluation()])
    table = format_table([evaluation(held_out=0.25), evaluation("Local")])
    lines = table.splitlines()
    assert "local test held out" in lines[0]
    assert lines[3].split()[4:7] == ["25.00", "0.00", "25.00"]
    assert lines[4].split()[4:7] == ["-", "-", "-"]
    assert "FedAvg, Local: global expert, after aggregation, last round (round 4)" in lines


def test_table_of_given_metrics():
    table = format_table([evaluation()], ["validation"])
    assert "global test:" not in table
    assert "validation: accuracy on the client's validation samples" in table


def test_mean_gate_weight_by_class():
    weights = mean_gate_weight_by_class(mixture(), num_classes=4)
    expected = torch.tensor([[0.25, 0.625, nan, nan], [nan, nan, 0.75, nan], [nan, 0.15, nan, nan]])
    torch.testing.assert_close(weights, expected.double(), equal_nan=True, atol=1e-7, rtol=0)
    assert mean_gate_weight_by_class(evaluation(), num_classes=4).isnan().all()


def test_gate_weight_figure_has_fixed_colour_limits_and_a_number_in_every_cell():
    axes = gate_weight_figure(mixture(), num_classes=4).axes[0]
    assert axes.images[0].get_clim() == (0.0, 1.0)
    assert sorted(text.get_text() for text in axes.texts) == ["0.15", "0.25", "0.62", "0.75"]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "1", "2"]


def test_sorted_accuracy_figure_is_the_cumulative_distribution():
    panels = sorted_accuracy_figure([evaluation(local=(0.9, 0.5, 0.7)), mixture()]).axes
    assert [axes.get_title() for axes in panels] == [
        "local test: all clients, sorted",
        "global test: all clients, sorted",
    ]
    line = panels[0].lines[0]
    assert line.get_label() == "FedAvg"
    np.testing.assert_allclose(line.get_ydata(), [50, 50, 70, 90])
    np.testing.assert_allclose(line.get_xdata(), [0, 1 / 3, 2 / 3, 1])
    assert len(panels[0].lines) == 2


def test_figures_of_many_clients_and_classes_render():
    many = evaluation(local=[0.5] * 200, gates=[gate([0.5], [150])] * 200)
    pixels = figure_pixels(gate_weight_figure(many, num_classes=151))
    assert pixels.dtype == np.uint8
    assert pixels.shape[1:] == (700, 3)


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_bar_counts_work(federation, monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    seen = []

    class Watch(ProgressBar):
        def on_client_end(self, *arguments):
            super().on_client_end(*arguments)
            seen.append((self._bar.n, self._bar.total))

    bar = Watch()
    federation.run(bar)
    assert seen == [(n, 40.0) for n in (5.0, 10.0, 15.0, 20.0, 30.0, 40.0)]
    assert bar._bar.desc == "PFL MFE round 1/1"
    assert bar._bar.postfix == "PFL MFE: local 90.00 %, global 60.00 %"
    assert "100%" in sys.stderr.getvalue()


def test_progress_bar_of_a_resumed_run_starts_where_it_stopped(federation, monkeypatch):
    monkeypatch.setattr("sys.stderr", Terminal())
    federation.completed_work = 20.0
    bar = ProgressBar()
    bar.on_fit_start(federation)
    assert (bar._bar.n, bar._bar.initial) == (20.0, 20.0)
    bar.on_fit_end(federation)


def test_progress_without_a_terminal_is_one_line_per_phase(federation, capsys):
    federation.run(ProgressBar())
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (
        "[ 50% 00:00<00:00] FedAvg: 2 rounds, local 70.00 %, global 60.00 %\n"
        "[100% 00:00<00:00] PFL MFE: 1 round, local 90.00 %, global 60.00 %\n"
    )


def test_result_files(federation, capsys):
    federation.run(ResultFiles())

    def methods(name):
        with (federation.run_dir / name).open(newline="") as file:
            return [row["method"] for row in csv.DictReader(file)]

    assert methods("rounds.csv") == ["FedAvg", "FedAvg", "PFL MFE"]
    assert methods("clients.csv") == ["FedAvg"] * 3 + ["PFL MFE"] * 3
    assert methods("summary.csv") == ["FedAvg", "PFL MFE"]
    assert format_table(federation.results.values()) in capsys.readouterr().out


def test_accuracies_in_tensorboard_and_in_other_loggers(federation):
    federation.states["FedAvg"].traffic["bytes_up"] = 70
    federation.run(AccuracyMonitor())
    log = events(federation)
    scalars = {tag: [(e.step, round(e.value, 6)) for e in log.Scalars(tag)] for tag in log.Tags()["scalars"]}
    assert scalars["FedAvg/local_test/mean"] == [(1, 0.7), (2, 0.7)]
    assert scalars["FedAvg/local_test/worst_tenth"] == [(1, 0.5), (2, 0.5)]
    assert scalars["PFL_MFE/local_test/mean"] == [(3, 0.9)]
    assert scalars["final/PFL_MFE/global_test"] == [(3, 0.6)]
    assert not any("validation" in tag or "held_out" in tag for tag in scalars)
    assert scalars["FedAvg/flops"] == [(1, 2.5e9), (2, 2.5e9)]
    assert scalars["FedAvg/traffic/bytes_up"] == [(1, 70), (2, 70)]
    assert "PFL_MFE/flops" not in scalars, "nobody could count them"
    assert [e.step for e in log.Images("accuracy_of_all_clients/sorted")] == [2, 3]
    table = make_ndarray(log.Tensors("table/text_summary")[0].tensor_proto).item().decode()
    assert table == f"```\n{format_table(federation.results.values())}\n```"
    with (federation.run_dir / "csv" / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert float(rows[0]["FedAvg/local_test/mean"]) == pytest.approx(0.7)


def test_hyperparameters_page_has_the_final_accuracies(federation):
    from tensorboard.plugins.hparams import metadata

    federation.run(AccuracyMonitor())
    contents = events(federation).summary_metadata
    experiment = metadata.parse_experiment_plugin_data(
        contents["_hparams_/experiment"].plugin_data.content  # what the HPARAMS page reads
    )
    session = metadata.parse_session_start_info_plugin_data(
        contents["_hparams_/session_start_info"].plugin_data.content
    )
    assert {metric.name.tag for metric in experiment.metric_infos} == {
        f"final/{method}/{metric}" for method in ("FedAvg", "PFL_MFE") for metric in ("local_test", "global_test")
    }
    assert session.hparams["model"].string_value == "PersonalizedMoE"
    assert session.hparams["model/lr"].number_value == 0.1


def test_gate_weights_in_tensorboard(federation):
    federation.run(GateMonitor(max_clients=2))
    log = events(federation)
    tags = [tag for tag in log.Tags()["tensors"] if tag.startswith("gate_weights")]
    assert tags == ["gate_weights/PFL_MFE/client_000", "gate_weights/PFL_MFE/client_001"]
    (event,) = log.Tensors("gate_weights/PFL_MFE/client_000")
    left, right, counts = make_ndarray(event.tensor_proto).T
    assert event.step == 3
    assert (left[0], right[-1], len(counts)) == (0.0, 1.0, 30)
    assert {int(i): counts[i] for i in counts.nonzero()[0]} == {0: 1, 7: 1, 15: 1, 29: 1}  # 0, 0.25, 0.5 and 1
    (event,) = log.Tensors("mean_gate_weight/PFL_MFE/over_clients")
    assert make_ndarray(event.tensor_proto)[:, 2].sum() == 3
    assert log.Scalars("PFL_MFE/mean_gate_weight/mean")[0].value == pytest.approx((0.4375 + 0.75 + 0.15) / 3)
    (image,) = log.Images("gate_weights/PFL_MFE/by_client_and_class")
    assert image.width == 700
    assert not any("FedAvg" in tag for tag in log.Tags()["scalars"])  # has no gate


def test_partition_in_tensorboard_once(federation, monkeypatch):
    monkeypatch.setattr(partition, "partition_figure", lambda datamodule: sorted_accuracy_figure([evaluation()]))
    monkeypatch.setattr(partition, "partition_table", lambda datamodule: f"{datamodule.num_classes} classes")
    PartitionMonitor().on_fit_start(federation)
    federation.step = 2
    PartitionMonitor().on_fit_start(federation)
    log = events(federation)
    assert len(log.Images("partition")) == 1
    (text,) = log.Tensors("partition/text_summary")
    assert make_ndarray(text.tensor_proto).item() == b"```\n4 classes\n```"
