"""Metrics of torchmetrics, computed for each client, and what is refused for a task."""

import math
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torchmetrics
from helpers import TensorData, blobs, mixture
from helpers.data import refused_argument
from helpers.reports import cost_rows, csv_rows
from helpers.runs import Kill, assert_same, resumed_after
from helpers.workers import TwoInThisProcess
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torchmetrics import F1Score, MeanSquaredError, Metric, R2Score

from fedmoe_pl import Federation, PersonalizedMoE, Phase, Select, Train
from fedmoe_pl.algorithms import FedAvg, FineTuning, Local, PFLMoE
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.callbacks import CostToTarget
from fedmoe_pl.callbacks.cost_to_target import target_rows
from fedmoe_pl.callbacks.figures import partition_figure
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import (
    CsvFile,
    Diabetes,
    RandomHorizontalFlip,
    SyntheticMultilabel,
    SyntheticShapes,
    partition_rows,
    partition_table,
)
from fedmoe_pl.evaluation.metrics import Meter
from fedmoe_pl.evaluation.results import ACCURACIES, ClientEvaluation, Evaluation
from fedmoe_pl.models import GlobalOnly, LinearGate, LocalOnly, SmallFCN
from fedmoe_pl.report.costs import costs, default_target
from fedmoe_pl.report.latex import latex
from fedmoe_pl.report.report import report
from fedmoe_pl.report.runs import read_run
from fedmoe_pl.report.settings import conditions, settings_of
from fedmoe_pl.report.tables import Choices, condition_of
from fedmoe_pl.rounds.begin import phase_module
from fedmoe_pl.setup.check_run import check_phase

nan = math.nan
SIZES = (13, 8, 11)


def numbers(sizes=SIZES, dtype=torch.float32, **kwargs):
    """Values of a linear function of its own for each client."""
    generator = torch.Generator().manual_seed(0)
    n = sum(sizes)
    x = torch.randn(n + 9, 4, generator=generator)
    owner = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    slopes = torch.randn(len(sizes), 4, generator=generator)
    y = torch.cat(((x[:n] * slopes[owner]).sum(1), x[n:].sum(1)))
    arguments = {"batch_size": 4, "test_fraction": 0.3, "validation_fraction": 0.2, **kwargs}
    datamodule = TensorData(x[:n], y[:n], torch.arange(n).split(list(sizes)), (x[n:], y[n:]), dtype, **arguments)
    datamodule.setup()
    return datamodule


def regression(dtype=torch.float32, **kwargs):
    torch.manual_seed(0)
    expert = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    return PersonalizedMoE(expert, optimizer=partial(torch.optim.SGD, lr=0.1), task="regression", **kwargs).to(dtype)


def phases(**kwargs):
    torch.manual_seed(1)
    return [
        Phase("FedAvg", FedAvg("global_expert.*"), rounds=4, gate=GlobalOnly(), **kwargs),
        Phase("PFL-FT", FineTuning(gate_fraction=0.25), gate=LocalOnly()),
        Phase("PFL-MF", PFLMoE(), gate=LinearGate(4)),
    ]


def federation(path, phases, metrics=None, **kwargs):
    off = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False}
    trainer = {"accelerator": "cpu", "max_epochs": 2}
    return Federation(phases, trainer, default_root_dir=str(path), metrics=metrics, **{**off, **kwargs})


def errors():
    return {"rmse": MeanSquaredError(squared=False), "r2": R2Score()}


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    shown = {"logger": True, "enable_checkpointing": True, "callbacks": [CostToTarget(100.0, "global_test_rmse")]}
    run = federation(tmp_path_factory.mktemp("runs"), phases(select=Select("validation_rmse")), errors(), **shown)
    run.fit(regression(), numbers())
    return run


def by_hand(module, datamodule, samples):
    """Root of the mean squared error, R2 and the mean loss on some samples."""
    with torch.no_grad():
        values, y = module(datamodule.x[samples])[:, 0], datamodule.y[samples]
    squared = (values - y).square()
    r2 = 1 - squared.sum() / (y - y.mean()).square().sum()
    return squared.mean().sqrt().item(), r2.item(), squared.mean().item()


@pytest.mark.few(1)
@pytest.mark.parametrize("method", ["FedAvg", "PFL-FT", "PFL-MF"])
def test_each_client_has_the_metrics_of_its_model_on_each_set(fitted, method):
    data = fitted.run.datamodule
    for client in fitted.results[method].clients:
        module = fitted.client_module(method, client.client)
        sets = {"local_test": data.test_samples[client.client], "global_test": data.global_test}
        sets["validation"] = data.validation_samples[client.client]
        for name, samples in sets.items():
            expected = dict(zip(("rmse", "r2", "loss"), by_hand(module, data, samples), strict=True))
            for metric, value in expected.items():
                if len(samples) > 1 or metric != "r2":
                    assert client.value(f"{name}_{metric}") == pytest.approx(value, rel=1e-4), (name, metric)
        assert all(math.isnan(getattr(client, accuracy)) for accuracy in ACCURACIES)
    assert all(client.gate_labels is None for client in fitted.results[method].clients)
    assert bool(fitted.results[method].values("mean_gate_weight")) == (method == "PFL-MF")


def test_the_monitor_takes_the_round_with_the_lowest_error(fitted):
    column = [row["validation_rmse_mean"] for row in fitted.run.rows if row["method"] == "FedAvg"]
    assert fitted.results["FedAvg"].round == 1 + column.index(min(column))
    assert fitted.results["FedAvg"].spread("validation_rmse").mean == min(column)
    assert len(column) == 4 and len({*column}) > 1


def test_the_worst_tenth_has_the_highest_errors():
    clients = [ClientEvaluation(i, 1, *[nan] * 4, metrics={"local_test_rmse": v}) for i, v in enumerate((1.0, 3.0))]
    evaluation = Evaluation("p", 1, "mixture", "", "", clients, lower_is_better=["local_test_rmse"])
    assert evaluation.spread("local_test_rmse").worst_tenth == 3.0
    evaluation.lower_is_better.clear()
    assert evaluation.spread("local_test_rmse").worst_tenth == 1.0


@pytest.mark.slow
@pytest.mark.parametrize("backend", [StackedBackend, TwoInThisProcess])
def test_all_backends_give_the_same_metrics(backend, tmp_path):
    run = federation(tmp_path, phases(), errors(), backend=backend())
    run.fit(regression(torch.float64), numbers(dtype=torch.float64))
    expected = federation(tmp_path, phases(), errors(), backend=TrainerBackend())
    expected.fit(regression(torch.float64), numbers(dtype=torch.float64))
    for method, evaluation in run.results.items():
        ours, theirs = ([c.metrics for c in result.clients] for result in (evaluation, expected.results[method]))
        if backend is not StackedBackend:
            assert_same(ours, theirs)
        for one, other in zip(ours, theirs, strict=True):
            assert one == pytest.approx(other, rel=1e-6, nan_ok=True)


def test_a_killed_run_goes_on_with_the_same_bits(fitted, tmp_path):
    def make(metrics=None, **kwargs):
        selecting = phases(select=Select("validation_rmse"))
        return federation(tmp_path, selecting, metrics or errors(), enable_checkpointing=True, **kwargs)

    resumed = resumed_after(Kill("on_round_end", 3), make, regression, numbers)
    assert_same([vars(e) for e in resumed.results.values()], [vars(e) for e in fitted.results.values()])
    assert_same(resumed.run.rows, fitted.run.rows)
    with pytest.raises(MisconfigurationException, match="metrics"):
        make({"rmse": MeanSquaredError()}).fit(regression(), numbers(), ckpt_path="last")


def test_classes_have_metrics_beside_the_same_accuracies(tmp_path):
    data = blobs(dtype=torch.float32, test_fraction=0.3)
    data.setup()
    f1 = partial(F1Score, task="multiclass", num_classes=3, average="macro")
    made = [Phase("Local", Local(), gate=LocalOnly()), Phase("PFL-MF", PFLMoE(gate_fraction=0.0), gate=LinearGate(5))]
    torch.manual_seed(0)
    runs = [federation(tmp_path, made[:1], metrics) for metrics in ({"f1": f1()}, None)]
    for run in runs:
        run.fit(mixture(dtype=torch.float32), data)
    with_metric, without = (run.results["Local"].clients for run in runs)
    for one, other in zip(with_metric, without, strict=True):
        module = runs[0].client_module("Local", one.client)
        for name, samples in (("local_test", data.test_samples[one.client]), ("global_test", data.global_test)):
            expected = f1()(module(data.x[samples]).argmax(1), data.y[samples])
            assert one.metrics[f"{name}_f1"] == pytest.approx(expected.item(), abs=1e-6)
        assert (one.reweighted_test, one.global_test, one.local_test) == (
            other.reweighted_test,
            other.global_test,
            other.local_test,
        )
        assert other.metrics == {} and "local_test_loss" not in one.metrics


def test_the_pooled_mean_counts_each_client_as_often_as_it_has_samples(tmp_path):
    """As PFLlib and FL-bench, which divide what all clients predict rightly by the number of all samples."""
    data = blobs((60, 17, 9), dtype=torch.float32, test_fraction=0.3)
    run = federation(tmp_path, [Phase("Local", Local(), gate=LocalOnly())], enable_checkpointing=True)
    run.fit(mixture(dtype=torch.float32), data)
    right = [
        run.client_module("Local", client)(data.x[test]).argmax(1) == data.y[test]
        for client, test in enumerate(data.test_samples)
    ]
    pooled, mean = torch.cat(right).double().mean().item(), run.results["Local"].spread("local_test").mean
    assert run.results["Local"].local_test_pooled == pytest.approx(pooled, abs=1e-12) != pytest.approx(mean)
    for name in ("rounds.csv", "summary.csv"):
        assert float(rows(run, name)[0]["local_test_pooled"]) == pytest.approx(pooled, abs=1e-12)
    assert [int(row["n_test"]) for row in rows(run, "clients.csv")] == [len(each) for each in right]


class Plain(LightningModule):
    """A user's own module with a training step of its own."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x).squeeze(1)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.l1_loss(self(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_users_own_module_has_metrics_of_what_it_returns(tmp_path):
    run = federation(tmp_path, [Phase("FedAvg", FedAvg(), rounds=2, select=Select("global_test_mae"))], {"mae": mae()})
    run.fit(Plain(), data := numbers())
    (client, *_), module = run.results["FedAvg"].clients, run.client_module("FedAvg", 0)
    with torch.no_grad():
        expected = (module(data.x[data.global_test]) - data.y[data.global_test]).abs().mean()
    assert client.metrics["global_test_mae"] == pytest.approx(expected.item(), rel=1e-5)
    assert math.isnan(client.validation_loss)


class Predicts(FedAvg):
    """With another way to predict."""

    def predictor(self, client, server):
        return lambda x: 2 * client.module(x)


def test_an_algorithm_s_own_predictions_are_measured_as_the_task_says(tmp_path):
    phase = Phase("FedAvg", Predicts("global_expert.*"), gate=GlobalOnly())
    run = federation(tmp_path, [phase], {"rmse": MeanSquaredError(squared=False)})
    run.fit(regression(), data := numbers())
    (client, *_), module = run.results["FedAvg"].clients, run.client_module("FedAvg", 0)
    with torch.no_grad():
        errors = 2 * module(data.x[data.global_test])[:, 0] - data.y[data.global_test]
    assert client.metrics["global_test_rmse"] == pytest.approx(errors.square().mean().sqrt().item(), rel=1e-5)
    assert client.metrics["global_test_loss"] == pytest.approx(errors.square().mean().item(), rel=1e-5)


def mae():
    return torchmetrics.MeanAbsoluteError()


def test_a_meter_measures_each_part_by_itself():
    torch.manual_seed(0)
    outputs, y = torch.randn(9), torch.randn(9)
    meter = Meter(Plain(), errors(), [4, 0, 1, 4], with_loss=False, wanted=[True, True, True, False])
    for start in (0, 3, 6):  # batches that end within a part
        meter.update(outputs[start : start + 3], y[start : start + 3])
    rmse, r2 = meter.values["rmse"], meter.values["r2"]
    assert rmse[0] == pytest.approx((outputs - y)[:4].square().mean().sqrt().item())
    assert rmse[2] == pytest.approx((outputs - y)[4].abs().item()) and math.isnan(rmse[1]) and math.isnan(rmse[3])
    assert not math.isnan(r2[0]) and math.isnan(r2[2]), "R2 needs two samples"


class Largest(torchmetrics.Metric):
    """A user's metric that keeps what it has seen in an attribute of its own, which `reset` leaves."""

    largest = -math.inf

    def update(self, preds, target):
        self.largest = max(self.largest, preds.max().item())

    def compute(self):
        return torch.tensor(self.largest)


def test_what_one_client_shows_a_users_metric_does_not_count_for_the_next():
    metric, outputs = Largest(), torch.tensor([1.0, 5.0, 2.0, 3.0])
    meter = Meter(Plain(), {"largest": metric}, [2, 1, 1], with_loss=False)
    meter.update(outputs, outputs)
    assert meter.values["largest"] == [5.0, 2.0, 3.0] and metric.largest == -math.inf


def test_values_far_from_0_have_exact_metrics():
    rse = torchmetrics.RelativeSquaredError
    given = {"r2": R2Score(), "rse": rse(), "ev": torchmetrics.ExplainedVariance(), "of_another": 1 - rse()}
    meter = Meter(Plain(), Federation(phases(), metrics=given).metrics, [4], with_loss=False)
    meter.update(torch.tensor([10001.0, 10000, 10003, 10002]), torch.tensor([10000.0, 10001, 10002, 10003]))
    expected = {"r2": 0.2, "rse": 0.8, "ev": 0.2, "of_another": 0.2}
    assert meter.values == {name: [pytest.approx(value)] for name, value in expected.items()}
    assert given["r2"].dtype == torch.float32, "the metrics of the federation are copies"


class BytesOfScores(torchmetrics.MeanMetric):
    def update(self, preds, target):
        super().update(preds.element_size())


def test_metrics_of_classes_have_the_type_of_the_outputs():
    """torchmetrics does not find the bounds of BinaryLogAUC in other numbers than float32."""
    meter = Meter(Plain(), Federation(phases(), metrics={"it": BytesOfScores()}).metrics, [40], with_loss=False)
    meter.update(torch.rand(40), torch.arange(40) % 2)
    assert meter.values == {"it": [4.0]}


def check(algorithm, module, datamodule, metrics=None, **kwargs):
    phase = Phase("p", algorithm, **kwargs)
    datamodule.setup()
    check_phase(phase, phase_module(module, phase), datamodule, seed=0, metrics=metrics)


class Vector(Metric):
    def update(self, preds, target): ...

    def compute(self):
        return torch.zeros(2)


DENSE = partial(PersonalizedMoE, SmallFCN(num_classes=2, channels=2))


@pytest.mark.parametrize(
    ("argument", "refused"),
    [
        ("task", lambda: check(FedAvg(), PersonalizedMoE(nn.Linear(4, 3)), numbers())),
        ("task", lambda: check(FedAvg(), PersonalizedMoE(nn.Linear(4, 3), task="regression"), numbers())),
        ("augmentation", lambda: check(FedAvg(), DENSE(), SyntheticShapes(augmentation=[RandomHorizontalFlip()]))),
        ("loss", lambda: regression(loss=nn.L1Loss(reduction="sum"))),
        ("metrics", lambda: check(FedAvg(), Plain(), numbers())),
        ("metrics.v", lambda: check(FedAvg(), Plain(), numbers(), {"v": Vector()})),
        ("metrics.f1", lambda: check(FedAvg(), regression(), numbers(), {"f1": F1Score("binary")})),
        ("metrics", lambda: Federation(phases(), metrics={"loss": mae()})),
        ("metrics", lambda: Federation(phases(), metrics=[mae()])),  # pyright: ignore[reportArgumentType]
        ("metrics", lambda: Federation(phases(), metrics=mae())),  # pyright: ignore[reportArgumentType]
        ("metrics", lambda: Federation(phases(), metrics={1: mae()})),  # pyright: ignore[reportArgumentType]
        ("select.monitor", lambda: check(FedAvg(), regression(), numbers(), select=Select("global_test"))),
        (
            "select.monitor",
            lambda: check(
                FedAvg(), regression(), numbers(test_fraction=0.0), errors(), select=Select("local_test_mae")
            ),
        ),
        (
            "select.monitor",
            lambda: check(
                FedAvg(), regression(), numbers(), {"r": torchmetrics.PearsonCorrCoef()}, select=Select("global_test_r")
            ),
        ),
    ],
)
def test_what_does_not_fit_is_refused_before_any_training(argument, refused):
    assert refused_argument(refused) == argument


@pytest.mark.parametrize(
    ("targets", "hint"),
    [
        ("20 30 25 30", r"0 for '20'; in a table, .* such as 20\.0\."),
        ("b a c a", r"0 for 'a'; floating-point targets are values\."),
        ("20.0 30.0 25.0 3.0", None),
    ],
)
def test_numbers_of_classes_are_no_values_of_a_regression(targets, hint, tmp_path):
    (tmp_path / "a.csv").write_text("\n".join(["x,y", *(f"{i},{each}" for i, each in enumerate(targets.split()))]))
    table, model = CsvFile(str(tmp_path), "y", test_fraction=0.5), PersonalizedMoE(nn.Linear(1, 1), task="regression")
    sentence = f"task is 'regression', but must be one that fits .* {hint}$"
    with nullcontext() if hint is None else pytest.raises(InvalidArgumentError, match=sentence):
        check(FedAvg(), model, table)


def test_data_without_classes_that_come_with_the_package():
    diabetes, labels, shapes = Diabetes(), SyntheticMultilabel(num_samples=50, num_clients=2), SyntheticShapes(5)
    for data in (diabetes, labels, shapes):
        data.setup()
        assert data.num_classes == 0 and data.class_counts().shape == (data.num_clients, 0)
    assert diabetes.num_clients == 6 and diabetes.y.shape == (442,) and len(diabetes.test_samples.indices) == 88
    assert labels.y.shape == (50, 5) and {*labels.y.unique().tolist()} == {0.0, 1.0}
    assert shapes.y.shape == (50, 16, 16) and shapes.y.unique().tolist() == [0, 1, 2] and shapes.x.shape[1] == 1


def rows(federation, name):
    return csv_rows(federation.run_dir / name)


def test_files_have_columns_by_the_metrics_name(fitted):
    summary, result = {row["method"]: row for row in rows(fitted, "summary.csv")}, fitted.results["PFL-MF"]
    spread = result.spread("local_test_rmse")
    assert float(summary["PFL-MF"]["local_test_rmse_worst_tenth"]) == spread.worst_tenth > spread.mean
    assert summary["PFL-MF"]["local_test_mean"] == summary["PFL-MF"]["global_test_mean"] == ""
    assert float(summary["PFL-MF"]["mean_gate_weight_mean"]) == result.spread("mean_gate_weight").mean
    assert f"local_test_rmse {spread.mean:.4g}" in repr(result)
    (first, *_), clients = rows(fitted, "clients.csv"), fitted.results["FedAvg"].clients
    for name in ("validation_rmse", "validation_loss", "global_test_loss"):
        assert float(first[name]) == clients[0].value(name)
    assert [*rows(fitted, "partition.csv")[0]] == ["client", "train", "validation", "test"]
    assert not (fitted.run_dir / "gate_weights.csv").exists(), "it would have the classes' weights"


def test_tensorboard_has_the_metrics(fitted):
    (folder,) = {path.parent for path in fitted.run_dir.rglob("events.*") if path.parent.name == "FedAvg"}
    tags = EventAccumulator(str(folder)).Reload().Tags()["scalars"]
    assert {"local_test_rmse/mean", "global_test_rmse/worst_tenth", "local_test_loss/std"} <= {*tags}
    assert not any(tag.startswith(("local_test/", "reweighted_test/", "global_test/")) for tag in tags)


def test_tables_and_predictions_have_the_metrics(fitted, capsys):
    fitted.test(regression(), numbers())
    table = capsys.readouterr().out
    assert "local test rmse" in table and "Metrics over all 3 clients" in table and "loss" not in table
    assert "global test rmse: rmse on the global test set; lower is better" in table
    fitted.validate(regression(), numbers())
    assert "validation loss: loss on the client's validation samples; lower is better" in capsys.readouterr().out
    fitted.predict(regression(), numbers())
    row, module, data = rows(fitted, "predictions.csv")[0], fitted.client_module("FedAvg", 0), numbers()
    sample = int(row["sample"])
    with torch.no_grad():
        assert float(row["prediction"]) == pytest.approx(module(data.x[[sample]]).item(), rel=1e-5)
    assert float(row["label"]) == data.y[sample].item()


def test_the_cost_counts_until_the_error_is_low_enough(fitted):
    reached = {row["method"]: row["rounds"] for row in rows(fitted, "target.csv")}
    assert reached == {"FedAvg": "1", "PFL-FT": "5", "PFL-MF": "6"}, "all are below 100 from the first round on"
    lacking = target_rows([{"method": "B", "evaluation_point": "any", "round": 1}], "e", 2.5)
    assert math.isnan(lacking[0]["rounds"]) and math.isnan(lacking[0]["best"]), "a method may lack the metric"
    (found,) = target_rows(cost_rows("A", (3.0, 1.0, 2.0), "e"), "e", 2.5, lower_is_better=True)
    assert (found["rounds"], found["best"], found["best_round"]) == (2, 1.0, 2)


def test_a_report_has_the_metrics_and_costs_until_the_error_is_low_enough(fitted, tmp_path, monkeypatch):
    monkeypatch.setattr("fedmoe_pl.report.pictures._saved", lambda *arguments: b'<svg viewBox="0 0 1 1"></svg>')
    monkeypatch.setattr("matplotlib.figure.Figure.draw_without_rendering", lambda figure: None)
    read = read_run(fitted.run_dir)
    assert read.metrics[0] == "local_test_rmse" and "global_test_rmse" in read.metrics
    page, markdown = report([str(fitted.run_dir), "--output", str(tmp_path / "r.html"), "--baseline", "PFL-FT"])
    text = markdown.read_text()
    mean = fitted.results["FedAvg"].spread("local_test_rmse").mean
    assert f"| {mean:.4g} " in text and "rmse on the global test set" in text and "percent" not in text
    assert "local test rmse" in page.read_text()
    (condition,) = [condition_of(*each, Choices()) for each in conditions(settings_of([read])[0], []).items()]
    assert condition.lower_is_better("global_test_rmse") and condition.lower_is_better("local_test_loss")
    errors = [row["global_test_rmse_mean"] for row in fitted.run.rows if row["method"] == "FedAvg"]
    first, *_ = costs(condition, "global_test_rmse", max(errors))
    assert (first.label, first.rounds, first.best) == ("FedAvg", 1 + errors.index(max(errors)), min(errors))
    assert default_target(condition, "global_test_rmse") >= min(errors)


def test_a_report_knows_that_lower_is_better_where_all_clients_are_equal(tmp_path):
    untrained = Phase("start", FedAvg("global_expert.*"), gate=GlobalOnly(), train=Train(max_epochs=0))
    methods = [*phases()[:1], untrained]
    run = federation(tmp_path, methods, errors())
    worse, better = reversed([each.spread("global_test_rmse") for each in run.fit(regression(), numbers()).values()])
    assert worse.mean > better.mean == better.worst_tenth, "the worst tenth does not tell which one is better"
    lower = ["local_test_rmse", "global_test_rmse", "validation_rmse", "local_test_loss", "global_test_loss"]
    assert all(row["lower_is_better"].split() == lower for row in rows(run, "rounds.csv"))
    settings, _ = settings_of([read_run(run.run_dir)])
    condition = condition_of("", settings, Choices(metric="global_test_rmse"))
    assert not condition.lower_is_better("global_test_r2")
    assert f"\\mathbf{{{better.mean:.4g}}}" in latex(condition)
    of_rounds = [row["global_test_rmse_mean"] for row in run.run.rows if row["method"] == "FedAvg"]
    found, _ = costs(condition, "global_test_rmse", min(of_rounds))
    assert (found.rounds, found.best) == (1 + of_rounds.index(min(of_rounds)), min(of_rounds))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("make", "expert"),
    [
        (lambda: SyntheticMultilabel(31, 6, 3, num_clients=2, batch_size=5), nn.Linear(6, 3)),
        (lambda: SyntheticShapes(7, 12, batch_size=4), SmallFCN(num_classes=3, channels=2)),
    ],
    ids=["labels", "pixels"],
)
def test_stacked_clients_with_short_batches_give_the_same_models(make, expert, tmp_path):
    task = "multilabel" if isinstance(expert, nn.Linear) else "multiclass"
    models = []
    for backend in (StackedBackend(), TrainerBackend()):
        run = federation(tmp_path, phases()[:1], backend=backend)
        result = run.fit(PersonalizedMoE(expert, task=task), make())["FedAvg"]
        assert result.spread("global_test_loss").std == 0
        models.append(run.client_module("FedAvg", 0).state_dict())
    torch.testing.assert_close(*models)


def test_a_partition_without_classes_is_a_table_and_a_figure_of_sizes():
    data = numbers()
    sizes = data.train_samples.sizes.tolist()
    assert partition_table(data).startswith("3 clients, 32 training samples, 9 global test samples")
    assert len(partition_figure([*partition_rows(data)]).axes) == 1
    assert [row["train"] for row in partition_rows(data)] == sizes


@pytest.mark.slow
def test_methods_of_a_run_may_differ_in_their_metrics(tmp_path, capsys):
    methods = [Phase("plain", FedAvg(), model=Plain()), phases()[0]]
    run = federation(tmp_path, methods, {"rmse": MeanSquaredError(squared=False)})
    results = run.fit(regression(), numbers())
    assert "local test rmse" in capsys.readouterr().out
    for name in ("rounds.csv", "summary.csv"):
        plain, *_, mixture = rows(run, name)
        assert plain["global_test_loss_mean"] == "" and float(plain["global_test_rmse_mean"]) > 0
        assert float(mixture["global_test_loss_mean"]) == results["FedAvg"].spread("global_test_loss").mean


LOSSES = {
    "the usual one": None,
    "with weights of classes": nn.CrossEntropyLoss(weight=torch.tensor([0.5, 3.0, 10.0], dtype=torch.float64)),
    "with an ignored class": nn.CrossEntropyLoss(ignore_index=2),
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_client_does_not_depend_on_how_its_samples_are_divided_among_batches(name):
    module = PersonalizedMoE(SmallFCN(5, 3), gate=GlobalOnly(), loss=LOSSES[name])
    outputs = torch.randn(9, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([0, 1, 2, 0, -100 if name == "the usual one" else 2, 1, 0, 2, 0])
    meter = Meter(module, {}, [5, 4], with_loss=True)
    for start, end in ((0, 2), (2, 7), (7, 9)):
        meter.update(outputs[start:end], targets[start:end])
    expected = [module.loss_of(outputs[part], targets[part]).item() for part in (slice(5), slice(5, 9))]
    assert meter.values["loss"] == pytest.approx(expected, rel=1e-12)
