"""What a run shows of its own numbers: on stderr while it trains, in files, and in loggers."""

import io
import json
import sys
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.evaluations import evaluation, mixture
from helpers.reports import csv_rows
from helpers.runs import Notes, data, federation, model
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams import metadata
from tensorboard.util.tensor_util import make_ndarray

from fedmoe_pl import Phase
from fedmoe_pl.algorithms import FedAvg, Local
from fedmoe_pl.callbacks import AccuracyMonitor, ExpertMonitor, GateMonitor, ProgressBar, ResultFiles
from fedmoe_pl.callbacks.hparams import method_hparams
from fedmoe_pl.checkpoints.phase_state import PhaseState
from fedmoe_pl.data.client_names import ClientNames
from fedmoe_pl.logs.loggers import RunLoggers
from fedmoe_pl.logs.summary import format_table
from fedmoe_pl.models import GlobalOnly, LinearGate

HPARAMS = {
    "model": {"class_path": "PersonalizedMoE", "init_args": {"mixing": "probabilities", "channels_last": True}},
    "federation": {
        "phases": [
            {"name": "FedAvg", "rounds": 2},
            {"name": "PFL MFE", "rounds": 1, "select": {"monitor": "reweighted_test"}},
        ]
    },
}


class Terminal(io.StringIO):
    def isatty(self):
        return True


class LoggerOfPictures(CSVLogger):
    """A user's logger with a ``log_image`` like that of ``WandbLogger``."""

    pictures = ()

    def log_image(self, key, images, step=None):
        self.pictures = (*self.pictures, (key, images[0].shape[1:], step))


def fitted(path, *callbacks, loggers=False):
    """A run of three clients with 13, 8 and 11 samples of three classes; the second method has a trained gate."""
    torch.manual_seed(1)
    phases = [
        Phase("FedAvg", FedAvg("global_expert.*"), rounds=2, gate=GlobalOnly()),
        Phase("PFL MFE", Local(), gate=LinearGate(5), start="initial"),
    ]
    trainer = {"accelerator": "cpu", "max_epochs": 1}
    run = federation(path, phases, trainer=trainer, callbacks=[*callbacks], logger=loggers, enable_progress_bar=True)
    run.hparams = HPARAMS
    run.fit(model(), data())
    return run


@pytest.fixture(scope="module")
def shown(tmp_path_factory):
    """A run in a terminal with a logger of each kind."""
    path = tmp_path_factory.mktemp("shown")
    loggers = [kind(path, name="", version=kind.__name__) for kind in (TensorBoardLogger, LoggerOfPictures)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stderr", Terminal())
        bar, notes = ProgressBar(), Notes(on_client_end=lambda *arguments: (bar._bar.n, bar._bar.total))
        return fitted(path, bar, notes, AccuracyMonitor([0, 2]), GateMonitor(max_clients=2), loggers=loggers)


def events(run, method=""):
    folder = run.run.loggers.all[0].log_dir
    return EventAccumulator(f"{folder}/{method}", size_guidance={"tensors": 0, "images": 0}).Reload()


def scalars(run, method):
    log = events(run, method)
    return {tag: [(e.step, pytest.approx(e.value)) for e in log.Scalars(tag)] for tag in log.Tags()["scalars"]}


def of_rounds(run, method, column):
    return [(row["round"], row[column]) for row in run.run.rows if row["method"] == method]


def accuracies(evaluation, *metrics):
    shares = [f"{metric} {100 * evaluation.spread(f'{metric}_test').mean:.2f} %" for metric in metrics]
    return f"{', '.join(shares)} (round {evaluation.round})"


@pytest.mark.slow
def test_progress_bar_counts_work(shown):
    bar, notes, *_ = (each for each in shown.callbacks if isinstance(each, ProgressBar | Notes))
    of_round = 32 + 8 * 20  # samples, and steps that count as 20 each; a client is a third of it
    assert notes.noted == [(pytest.approx(of_round * n / 3), pytest.approx(3 * of_round)) for n in range(1, 10)]
    assert bar._bar.desc == "PFL MFE 1/1"
    assert bar._bar.postfix == accuracies(shown.results["PFL MFE"], "reweighted")
    assert "100%" in bar._bar.fp.getvalue()


def test_progress_names_the_round_of_its_accuracy_and_shows_none_of_another_phase(shown, monkeypatch):
    """While a round trains, the newest accuracy is that of a round before it."""
    monkeypatch.setattr("sys.stderr", Terminal())
    bar, run, (fedavg, other) = ProgressBar(), shown.run, shown.phases
    first = replace(shown.results["FedAvg"], round=1)
    bar.on_fit_start(run)
    bar.on_round_start(run, fedavg, 0)
    bar.on_evaluation_end(run, fedavg, first)
    bar.on_round_start(run, fedavg, 1)
    assert (bar._bar.desc, bar._bar.postfix) == ("FedAvg 2/2", accuracies(first, "reweighted"))
    bar.on_evaluation_end(run, other, shown.results["PFL MFE"])  # as before the only round, after fewer epochs
    assert (bar._bar.desc, bar._bar.postfix) == ("FedAvg 2/2", accuracies(first, "reweighted"))


@pytest.mark.parametrize("seconds", [0, 25])
def test_progress_without_a_terminal_is_one_line_per_phase_and_one_a_minute(seconds, tmp_path, monkeypatch, capsys):
    clock = count(step=seconds)
    monkeypatch.setattr("fedmoe_pl.callbacks.progress_bar.time.monotonic", lambda: next(clock))
    results = fitted(tmp_path).results
    printed, lines = capsys.readouterr()
    fedavg, other = (accuracies(each, "reweighted", "global") for each in results.values())
    if seconds:
        for line in (f"FedAvg: 2 rounds, {fedavg}", f"PFL MFE: 1 round, {other}", "FedAvg: round 2/2, reweighted "):
            assert f"] {line}" in lines
    else:
        of_phases = f"[ 67% 00:00<00:00] FedAvg: 2 rounds, {fedavg}\n[100% 00:00<00:00] PFL MFE: 1 round, {other}\n"
        assert lines == of_phases and format_table(results.values()) in printed


def test_progress_says_how_many_rounds_a_phase_had(shown, capsys):
    """FedAvg may have two rounds and ends after one; the other phase's result comes from a checkpoint."""
    bar, (fedavg, given) = ProgressBar(), shown.phases
    states = {phase.name: PhaseState({}, {}) for phase in shown.phases}
    run = SimpleNamespace(progress=shown.run.progress, states=states)
    bar.on_fit_start(run)
    bar.on_round_start(run, fedavg, 0)
    states["FedAvg"].round, states["FedAvg"].stopped = 1, True
    bar.on_phase_end(run, fedavg, None)
    states["PFL MFE"].round, states["PFL MFE"].given_round = 1, 7
    bar.on_phase_end(run, given, None)
    bar.on_round_start(run, given, 0)  # newcomers train what clients keep, beside a given server
    bar.on_phase_end(run, given, None)
    lines = [line.split("] ")[1] for line in capsys.readouterr().err.splitlines()]
    assert lines == ["FedAvg: 1 round", "PFL MFE: given checkpoint", "PFL MFE: 1 round"]


def test_the_end_of_a_run_names_the_next_commands_also_where_a_name_cannot_be_printed(shown, tmp_path, monkeypatch):
    results = {"опыт": replace(shown.results["FedAvg"], method="опыт")}
    loggers = RunLoggers([TensorBoardLogger(tmp_path, name="", version="tb")])
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    folder = tmp_path / "my run"
    ResultFiles().on_fit_end(SimpleNamespace(folder=folder, results=results, states={}, loggers=loggers))
    text = out.buffer.getvalue().decode()  # pyright: ignore[reportAttributeAccessIssue]
    assert r"\u043e\u043f\u044b\u0442" in text
    assert text.endswith(
        f"Files: {folder}\nNext:  fedmoe report '{folder}'\n       tensorboard --logdir {tmp_path}/tb\n"
    )


def test_files_have_the_partition_and_the_weights_of_trained_gates(shown):
    """Those with results are in test_federation.py."""
    gates = [(row["method"], row["client"], row["expert"]) for row in csv_rows(shown.run_dir / "gate_weights.csv")]
    assert gates == [("PFL MFE", client, "global") for client in "012"]
    counts = shown.run.datamodule.class_counts().long()
    for client, row in enumerate(csv_rows(shown.run_dir / "partition.csv")):
        assert [*row] == ["client", "train", "validation", "test", "class_0", "class_1", "class_2"]
        assert [int(value) for value in row.values()] == [client, (13, 8, 11)[client], 0, 0, *counts[client].tolist()]


def test_accuracies_in_tensorboard_and_in_other_loggers(shown):
    """Each method is a run with the same tags; the step is the round of its own phase."""
    fedavg, mixed, whole = scalars(shown, "FedAvg"), scalars(shown, "PFL MFE"), events(shown)
    for name in ("reweighted_test_mean", "reweighted_test_worst_tenth", "global_test_std"):
        tag = name.replace("_test_", "_test/")
        assert (fedavg[tag], mixed[tag]) == tuple(of_rounds(shown, method, name) for method in shown.results)
    final = shown.results["PFL MFE"]
    assert mixed["result/global_test"] == [(1, final.spread("global_test").mean)]
    assert mixed["result/reweighted_test"] == [(1, final.spread("reweighted_test").mean)]
    assert not any(tag.startswith(("validation", "local_test")) for tag in mixed)
    for name in ("flops", "bytes_up"):
        assert fedavg[f"resources/{name}"] == of_rounds(shown, "FedAvg", name)
    assert min(tag for tag in fedavg if "client" not in tag) == "global_test/mean", "what TensorBoard shows first"
    of_clients = {tag for tag in fedavg if tag.startswith("reweighted_test/client")}
    assert of_clients == {"reweighted_test/client_000", "reweighted_test/client_002"}
    _, last = fedavg["reweighted_test/client_002"]
    assert last == (2, shown.results["FedAvg"].clients[2].reweighted_test)
    assert whole.Tags()["scalars"] == []
    assert [e.step for e in whole.Images("sorted_accuracies")] == [2, 3]
    table = make_ndarray(whole.Tensors("table/text_summary")[0].tensor_proto).item().decode()
    assert table == f"```\n{format_table(shown.results.values())}\n```"
    of_csv = [
        (int(row["step"]), pytest.approx(float(row["FedAvg/reweighted_test/mean"])))
        for row in csv_rows(Path(shown.run.loggers.all[1].log_dir) / "metrics.csv")
        if row["FedAvg/reweighted_test/mean"]
    ]
    assert of_csv == of_rounds(shown, "FedAvg", "reweighted_test_mean")


def test_costs_are_shown_where_there_are_some(shown, tmp_path):
    """What is evaluated before the first round has cost nothing, and nobody can count the FLOPs of some modules."""
    logger, values = CSVLogger(tmp_path, name="", version=""), {"epsilon": 1.5, "sample_epsilon": 0.25}
    for round in range(2):
        state = PhaseState({}, {}, round=round, flops=float("nan"), **values)
        run = SimpleNamespace(states={"FedAvg": state}, loggers=RunLoggers([logger]), trainer={"max_epochs": 1})
        AccuracyMonitor().on_evaluation_end(run, shown.phases[0], replace(shown.results["FedAvg"], round=round))
    logger.save()
    rows = csv_rows(tmp_path / "metrics.csv")
    found = [{name: row[f"FedAvg/resources/{name}"] for name in values} for row in rows]
    assert found == [dict.fromkeys(values, ""), {name: str(value) for name, value in values.items()}]
    assert "FedAvg/resources/flops" not in rows[0]


@pytest.mark.parametrize(("logs", "validate"), [(False, 1.0), (True, 1.0), (True, 0)])
def test_the_loss_of_validation_samples_is_logged_unless_clients_log_their_own(logs, validate):
    """Loggers that write into folders, such as MLflow's, cannot take ``validation_loss`` and what is below it."""
    losses, found = (0.25, 0.5, 1.5), {}
    made_up = evaluation()
    clients = [replace(each, validation_loss=loss) for each, loss in zip(made_up.clients, losses, strict=True)]
    run = SimpleNamespace(
        states={"FedAvg": PhaseState({}, {})},
        loggers=SimpleNamespace(log_scalars=lambda method, values, step: found.update(values)),
        datamodule=SimpleNamespace(client_names=ClientNames.numbers(3)),
        trainer={"max_epochs": 1, "logger": logs, "limit_val_batches": validate},
    )
    phase = Phase("FedAvg", FedAvg("global_expert.*"))
    made_up = replace(made_up, clients=clients, lower_is_better=["validation_loss"])
    AccuracyMonitor([1]).on_evaluation_end(run, phase, made_up)
    expected = {"mean": np.mean(losses), "std": np.std(losses), "worst_tenth": 1.5, "client_001": 0.5}
    expected = {f"validation_loss/{name}": pytest.approx(value) for name, value in expected.items()}
    assert {tag: value for tag, value in found.items() if "loss" in tag} == ({} if logs and validate else expected)
    assert found["global_test/mean"] == found["global_test/client_001"] == 0.6


def test_the_hyperparameters_of_a_method_are_those_that_its_clients_train_with():
    def of_class(name, **arguments):
        return {"class_path": name, **arguments}

    train = {"max_epochs": 40, "batch_size": 5, "optimizer": of_class("torch.optim.Adam", lr=0.01)}
    train |= {"callbacks": [of_class("a.Stop")], "trainer": {"precision": "32-true"}}
    of_run = {
        "trainer": {"max_epochs": 2, "precision": "bf16-mixed", "callbacks": [of_class("a.Timer")]},
        "model": of_class("a.Net", optimizer=of_class("torch.optim.SGD", lr=0.1, momentum=0.5)),
        "data": of_class("a.Data", batch_size=10),
        "phases": [{"name": "FedAvg", "rounds": 3}, {"name": "PFL-MF", "train": train}],
    }
    found = method_hparams({"hparams": "", "objects": json.dumps(of_run)}, seed=0)
    same = {"model": "Net", "data": "Data", "seed": 0}
    timer, stop = of_run["trainer"]["callbacks"] + train["callbacks"]
    assert found == {
        "FedAvg": {
            **same,
            **{"rounds": 3, "max_epochs": 2, "batch_size": 10, "optimizer": "SGD", "lr": 0.1, "momentum": 0.5},
            **{"precision": "bf16-mixed", "callbacks": json.dumps([timer])},
        },
        "PFL-MF": {
            **same,
            **{"max_epochs": 40, "batch_size": 5, "optimizer": "Adam", "lr": 0.01},
            **{"precision": "32-true", "callbacks": json.dumps([timer, stop])},
        },
    }


@pytest.mark.parametrize("method", ["FedAvg", "PFL MFE"])
def test_the_page_of_hyperparameters_has_the_columns_of_all_methods_and_says_which_differ(method, shown):
    """TensorBoard reads the columns of one row only: FedAvg has no ``monitor``; a boolean is no number."""
    contents = events(shown, method).summary_metadata
    experiment = metadata.parse_experiment_plugin_data(contents["_hparams_/experiment"].plugin_data.content)
    differs = {column.name: column.differs for column in experiment.hparam_infos}
    others = dict.fromkeys(("method", "model", "mixing", "monitor", "seed", "channels_last"), False)
    assert differs == others | {"rounds": True}
    assert {metric.display_name for metric in experiment.metric_infos} == {"reweighted_test", "global_test"}
    session = metadata.parse_session_start_info_plugin_data(
        contents["_hparams_/session_start_info"].plugin_data.content
    )
    assert session.hparams["channels_last"].bool_value is True


def test_every_logger_with_log_image_gets_the_pictures(shown):
    expected = {("partition", 0), ("PFL_MFE/mean_gate_weight/by_client_and_class", 1)}
    expected |= {("sorted_accuracies", step) for step in (2, 3)}
    found = shown.run.loggers.all[1].pictures
    assert {(key, step) for key, _, step in found} == expected and {size for _, size, _ in found} == {(700, 3)}


def test_gate_weights_in_tensorboard(shown):
    log, clients = events(shown, "PFL MFE"), shown.results["PFL MFE"].clients
    tags = [tag for tag in log.Tags()["tensors"] if tag.startswith("weight_of_samples")]
    assert tags == ["weight_of_samples/client_000", "weight_of_samples/client_001"]
    means = [client.gate_weights[:, 0].mean().item() for client in clients]
    for tag, weights in {tags[1]: clients[1].gate_weights[:, 0], "mean_gate_weight/of_clients": means}.items():
        (event,) = log.Tensors(tag)
        left, right, counts = make_ndarray(event.tensor_proto).T
        assert (event.step, left[0], right[-1], len(counts)) == (1, 0.0, 1.0, 30)
        assert counts.tolist() == [sum(int(30 * weight) == bin for weight in weights) for bin in range(30)]
    expected = {"global": np.mean(means), "local": 1 - np.mean(means), "std_of_global": np.std(means)}
    found = scalars(shown, "PFL MFE")
    assert {name: found[f"mean_gate_weight/{name}"] for name in expected} == {
        name: [(1, value)] for name, value in expected.items()
    }
    (image,) = log.Images("mean_gate_weight/by_client_and_class")
    assert image.width == 700
    assert not any("gate_weight" in tag for tag in scalars(shown, "FedAvg")), "it has no gate"


def test_a_weight_that_rounding_has_lifted_above_1_is_in_the_histogram(tmp_path):
    weights = torch.tensor([[3.0, 2.0, 1.0, -18.0]]).softmax(1)[:, :-1].sum(1)
    loggers = RunLoggers([TensorBoardLogger(tmp_path)])
    loggers.log_histogram("weights", np.array([0.5, np.nextafter(1.0, 2.0), *weights.numpy()]), "", 1, "A")
    loggers.flush()
    (event,) = EventAccumulator(f"{loggers.all[0].log_dir}/A").Reload().Tensors("weights")
    assert make_ndarray(event.tensor_proto)[:, 2].nonzero()[0].tolist() == [15, 29]
    assert make_ndarray(event.tensor_proto)[:, 2].sum() == 3


@pytest.mark.parametrize("is_deployed", [False, True])
def test_means_that_clients_report_do_not_stand_for_their_samples(is_deployed):
    clients = [replace(each, n_test=len(each.gate_weights)) for each in mixture().clients]
    if is_deployed:  # as `Reports.reported` makes them
        clients = [replace(each, gate_weights=each.gate_weights.mean(0, keepdim=True), n_test=5) for each in clients]
    found = []
    loggers = SimpleNamespace(log_scalars=lambda method, values, step: found.extend(values), take_histograms=True)
    loggers.log_histogram = lambda tag, *arguments: found.append(tag.partition("/")[0])
    of_run = SimpleNamespace(loggers=loggers, rows=[], datamodule=SimpleNamespace(client_names=ClientNames.numbers(3)))
    GateMonitor()._log_samples(of_run, replace(mixture(), clients=clients))
    clients = [replace(each, has_global_expert=False) for each in clients]
    ExpertMonitor().on_evaluation_end(of_run, None, replace(mixture(), clients=clients))
    expected = [*["weight_of_samples"] * 3, "used_experts/expert_0", "used_experts/expert_1"]
    assert found == ([] if is_deployed else expected)


def test_the_mean_of_what_clients_log_does_not_depend_on_the_order_in_which_they_trained():
    found = []
    for order in ((0, 1, 2), (0, 2, 1), (2, 0, 1)):  # in a resumed round, those that had trained before come first
        logged = {client: [{"train_loss": (1e16, 1.0, -1e16)[client]}] for client in order}
        loggers = SimpleNamespace(log_scalars=lambda method, values, step: found.append((values, step)))
        of_phase = SimpleNamespace(name="Local", epochs=lambda trainer: 1)
        AccuracyMonitor().on_server_update(SimpleNamespace(logged=logged, loggers=loggers, trainer={}), of_phase, 0)
    assert found[0] == found[1] == found[2]


def test_partition_in_tensorboard(shown):
    log = events(shown)
    (image,), (text,) = log.Images("partition"), log.Tensors("partition/text_summary")
    assert image.width == 700
    assert b"3 clients, 3 classes" in make_ndarray(text.tensor_proto).item()


def test_a_logger_that_cannot_be_opened_is_named_before_any_training(tmp_path):
    (tmp_path / "file").touch()
    sentence = r"^federation.logger: CSVLogger cannot be opened: .* directory"
    with pytest.raises(MisconfigurationException, match=sentence):
        fitted(tmp_path / "runs", loggers=CSVLogger(tmp_path / "file"))
    assert not [*tmp_path.rglob("rounds.csv")]
