"""Metrics of torchmetrics, computed for each client, and what is refused for a task."""

import math
from functools import partial

import pytest
import torch
import torchmetrics
from helpers import TensorData, blobs, mixture
from helpers.runs import Kill, assert_same
from helpers.workers import TwoInThisProcess
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics import Accuracy, F1Score, MeanSquaredError, Metric, R2Score

from fedmoe_pl import Federation, PersonalizedMoE, Phase, Select
from fedmoe_pl.algorithms import FedAvg, FineTuning, Local, PFLMoE
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import Diabetes, RandomHorizontalFlip, SyntheticMultilabel, SyntheticShapes
from fedmoe_pl.evaluation.evaluation import METRICS, SPLITS, ClientEvaluation, Evaluation
from fedmoe_pl.evaluation.metrics import Meter
from fedmoe_pl.models import GlobalOnly, LinearGate, LocalOnly, SmallFCN
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
    run = federation(tmp_path_factory.mktemp("runs"), phases(select=Select("validation_rmse")), errors())
    run.fit(regression(), numbers())
    return run


def by_hand(module, datamodule, samples):
    """Root of the mean squared error, R2 and the mean loss on some samples."""
    with torch.no_grad():
        values, y = module(datamodule.x[samples])[:, 0], datamodule.y[samples]
    squared = (values - y).square()
    r2 = 1 - squared.sum() / (y - y.mean()).square().sum()
    return squared.mean().sqrt().item(), r2.item(), squared.mean().item()


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
        assert all(math.isnan(getattr(client, accuracy)) for accuracy in METRICS)
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


@pytest.mark.parametrize("backend", [TrainerBackend, StackedBackend, TwoInThisProcess])
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
    arguments = {"enable_checkpointing": True}
    with pytest.raises(KeyboardInterrupt):
        federation(
            tmp_path,
            phases(select=Select("validation_rmse")),
            errors(),
            callbacks=[Kill("on_round_end", 3)],
            **arguments,
        ).fit(regression(), numbers())
    resumed = federation(tmp_path, phases(select=Select("validation_rmse")), errors(), **arguments)
    resumed.fit(regression(), numbers(), ckpt_path="last")
    assert_same([vars(e) for e in resumed.results.values()], [vars(e) for e in fitted.results.values()])
    assert_same(resumed.run.rows, fitted.run.rows)
    other = federation(tmp_path, phases(select=Select("validation_rmse")), {"rmse": MeanSquaredError()}, **arguments)
    with pytest.raises(MisconfigurationException, match="metrics"):
        other.fit(regression(), numbers(), ckpt_path="last")


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


def test_an_accuracy_and_a_metric_named_alike_are_on_the_same_samples(tmp_path):
    run = federation(tmp_path, phases()[:1], {"accuracy": Accuracy("multiclass", num_classes=3)})
    run.fit(mixture(), blobs(test_fraction=0.3, validation_fraction=0.3))
    for client in run.results["FedAvg"].clients:
        for split in SPLITS:
            assert client.value(split) == pytest.approx(client.value(f"{split}_accuracy"))


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


def check(algorithm, module, datamodule, metrics=None, **kwargs):
    phase = Phase("p", algorithm, **kwargs)
    datamodule.setup()
    check_phase(phase, phase_module(module, phase), datamodule, seed=0, metrics=metrics)


class Vector(Metric):
    def update(self, preds, target): ...

    def compute(self):
        return torch.zeros(2)


def each(outputs, targets):
    return outputs - targets


DENSE = partial(PersonalizedMoE, SmallFCN(num_classes=2, channels=2))


@pytest.mark.parametrize(
    ("argument", "refused"),
    [
        ("task", lambda: check(FedAvg(), PersonalizedMoE(nn.Linear(4, 3)), numbers())),
        ("task", lambda: check(FedAvg(), PersonalizedMoE(nn.Linear(4, 3), task="regression"), numbers())),
        ("task", lambda: check(FedAvg(), PersonalizedMoE(nn.Linear(4, 1), task="binary"), numbers())),
        ("task", lambda: check(FedAvg(), DENSE(), SyntheticShapes())),
        ("augmentation", lambda: check(FedAvg(), DENSE(), SyntheticShapes(augmentation=[RandomHorizontalFlip()]))),
        ("loss", lambda: regression(loss=nn.L1Loss(reduction="sum"))),
        ("loss", lambda: check(FedAvg(), regression(loss=each), numbers())),
        ("metrics", lambda: check(FedAvg(), Plain(), numbers())),
        ("metrics.v", lambda: check(FedAvg(), Plain(), numbers(), {"v": Vector()})),
        ("metrics.f1", lambda: check(FedAvg(), regression(), numbers(), {"f1": F1Score("binary")})),
        ("metrics", lambda: Federation(phases(), metrics={"loss": mae()})),
        ("metrics.f1", lambda: Federation(phases(), metrics={"f1": F1Score})),
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
    with pytest.raises(InvalidArgumentError) as error:
        refused()
    assert error.value.argument == argument and "\n" not in str(error.value)


def test_data_without_classes_that_come_with_the_package():
    diabetes, labels, shapes = Diabetes(), SyntheticMultilabel(num_samples=50, num_clients=2), SyntheticShapes(5)
    for data in (diabetes, labels, shapes):
        data.setup()
        assert data.num_classes == 0 and data.class_counts().shape == (data.num_clients, 0)
    assert diabetes.num_clients == 6 and diabetes.y.shape == (442,) and len(diabetes.test_samples.indices) == 88
    assert labels.y.shape == (50, 5) and {*labels.y.unique().tolist()} == {0.0, 1.0}
    assert shapes.y.shape == (50, 16, 16) and shapes.y.unique().tolist() == [0, 1, 2] and shapes.x.shape[1] == 1
