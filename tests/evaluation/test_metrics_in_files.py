"""What a run without classes writes, prints and sends to TensorBoard, and what reads it."""

import csv
import math

import pytest
import torch
from helpers import TensorData
from helpers.clusters import clustered, only
from lightning.pytorch import LightningModule
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torchmetrics import MeanSquaredError

from fedmoe_pl import Federation, PersonalizedMoE, Phase
from fedmoe_pl.algorithms import EpsilonGreedyIFCA, FedAvg, Local, PFLMoE
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.callbacks import CostToTarget
from fedmoe_pl.callbacks.costs import target_rows
from fedmoe_pl.callbacks.figures import partition_figure
from fedmoe_pl.data import SyntheticMultilabel, SyntheticShapes, partition_rows, partition_table
from fedmoe_pl.models import GlobalOnly, LinearGate, LocalOnly, SmallFCN
from fedmoe_pl.report.command import report
from fedmoe_pl.report.costs import costs, default_target
from fedmoe_pl.report.runs import read_run
from fedmoe_pl.report.settings import conditions, settings_of
from fedmoe_pl.report.tables import condition_of


def data():
    generator = torch.Generator().manual_seed(0)
    x, slopes = torch.randn(39, 4, generator=generator), torch.tensor([[1.0], [2.0], [0.0], [-1.0]])
    arguments = {"batch_size": 4, "test_fraction": 0.3, "validation_fraction": 0.2}
    y, parts = (x @ slopes)[:, 0], torch.arange(30).split([13, 7, 10])
    return TensorData(x[:30], y[:30], parts, (x[30:], y[30:]), **arguments)


def model():
    torch.manual_seed(0)
    return PersonalizedMoE(nn.Linear(4, 1), task="regression")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    torch.manual_seed(1)
    parts = {"global_expert": "FedAvg", "local_expert": "Local"}
    phases = [
        Phase("FedAvg", FedAvg("global_expert.*"), rounds=3, gate=GlobalOnly()),
        Phase("Local", Local(), gate=LocalOnly()),
        Phase("gate", PFLMoE(gate_fraction=0.0), start=parts, gate=LinearGate(4)),
    ]
    made = Federation(
        phases,
        {"accelerator": "cpu", "max_epochs": 1},
        callbacks=[CostToTarget(100.0, "global_test_rmse")],
        default_root_dir=str(tmp_path_factory.mktemp("runs")),
        metrics={"rmse": MeanSquaredError(squared=False)},
    )
    made.fit(model(), data())
    return made


def rows(federation, name):
    with (federation.run_dir / name).open(newline="") as file:
        return list(csv.DictReader(file))


def test_files_have_columns_by_the_metrics_name(federation):
    summary = {row["method"]: row for row in rows(federation, "summary.csv")}
    spread = federation.results["gate"].spread("local_test_rmse")
    assert float(summary["gate"]["local_test_rmse_worst_tenth"]) == spread.worst_tenth > spread.mean
    assert summary["gate"]["local_test_mean"] == summary["gate"]["global_test_mean"] == ""
    assert float(summary["gate"]["mean_gate_weight_mean"]) == federation.results["gate"].spread("mean_gate_weight").mean
    assert f"local_test_rmse {spread.mean:.4g}" in repr(federation.results["gate"])
    (first, *_), clients = rows(federation, "clients.csv"), federation.results["FedAvg"].clients
    assert float(first["validation_rmse"]) == clients[0].metrics["validation_rmse"]
    assert float(first["validation_loss"]) == clients[0].validation_loss
    assert float(first["global_test_loss"]) == clients[0].metrics["global_test_loss"]
    assert [*rows(federation, "partition.csv")[0]] == ["client", "train", "validation", "test"]
    assert not (federation.run_dir / "gate_weights.csv").exists(), "it would have the classes' weights"


def test_tensorboard_has_the_metrics(federation):
    (folder,) = {path.parent for path in federation.run_dir.rglob("events.*") if path.parent.name == "FedAvg"}
    tags = EventAccumulator(str(folder)).Reload().Tags()["scalars"]
    assert {"local_test_rmse/mean", "global_test_rmse/worst_tenth", "local_test_loss/std"} <= {*tags}
    assert not any(tag.startswith(("local_test/", "reweighted_test/", "global_test/")) for tag in tags)


def test_commands_read_the_checkpoint(federation, capsys):
    federation.test(model(), data())
    table = capsys.readouterr().out
    assert "local test rmse" in table and "Metrics over all 3 clients" in table and "loss" not in table
    assert "global test rmse: rmse on the global test set; lower is better" in table
    federation.validate(model(), data())
    assert "validation loss: loss on the client's validation samples; lower is better" in capsys.readouterr().out
    federation.predict(model(), data())
    row = rows(federation, "predictions.csv")[0]
    module, datamodule, sample = federation.client_module("FedAvg", 0), data(), int(row["sample"])
    datamodule.setup()
    with torch.no_grad():
        assert float(row["prediction"]) == pytest.approx(module(datamodule.x[[sample]]).item(), rel=1e-5)
    assert float(row["label"]) == datamodule.y[sample].item()


def test_the_cost_counts_until_the_error_is_low_enough(federation):
    reached = {row["method"]: row["rounds"] for row in rows(federation, "target.csv")}
    assert reached == {"FedAvg": "1", "Local": "1", "gate": "5"}, "all are below 100; the gate starts from 3 + 1 rounds"
    lacking = target_rows([{"method": "B", "evaluation_point": "any", "round": 1}], "e", 2.5)
    assert math.isnan(lacking[0]["rounds"]) and math.isnan(lacking[0]["best"]), "a method may lack the metric"
    some = [
        {"method": "A", "evaluation_point": "any", "round": i, "e_mean": value}
        for i, value in enumerate((3.0, 1.0, 2.0))
    ]
    (found,) = target_rows([{**row, **spent()} for row in some], "e", 2.5, lower_is_better=True)
    assert (found["rounds"], found["best"], found["best_round"]) == (1, 1.0, 1)


def spent():
    ways = ("down", "up", "between_clients")
    before = dict.fromkeys(("rounds_before", "parameters_before", "bytes_before", "flops_before"), 0)
    return before | {"flops": 1} | {f"{name}_{way}": 1 for name in ("parameters", "bytes") for way in ways}


def test_a_report_has_the_metrics(federation, tmp_path, monkeypatch):
    monkeypatch.setattr("fedmoe_pl.report.pictures._saved", lambda *arguments: b'<svg viewBox="0 0 1 1"></svg>')
    monkeypatch.setattr("matplotlib.figure.Figure.draw_without_rendering", lambda figure: None)
    assert read_run(federation.run_dir).metrics[:2] == ["local_test_rmse", "global_test_rmse"]
    page, markdown = report([str(federation.run_dir), "--output", str(tmp_path / "r.html"), "--baseline", "Local"])
    text = markdown.read_text()
    mean = federation.results["FedAvg"].spread("local_test_rmse").mean
    assert f"| {mean:.4g} " in text and "rmse on the global test set" in text and "percent" not in text
    assert "local test rmse" in page.read_text()


def test_a_report_has_costs_until_the_error_is_low_enough(federation):
    (condition,) = [
        condition_of(*each) for each in conditions(settings_of([read_run(federation.run_dir)])[0], []).items()
    ]
    assert condition.lower_is_better("global_test_rmse") and condition.lower_is_better("local_test_loss")
    errors = [row["global_test_rmse_mean"] for row in federation.run.rows if row["method"] == "FedAvg"]
    first, *_ = costs(condition.methods, "global_test_rmse", max(errors), lower_is_better=True)
    assert (first.label, first.rounds, first.best) == ("FedAvg", 1 + errors.index(max(errors)), min(errors))
    assert default_target(condition, "global_test_rmse") >= min(errors)


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
        made = Federation(
            [Phase("FedAvg", FedAvg("global_expert.*"), gate=GlobalOnly())],
            {"accelerator": "cpu", "max_epochs": 1},
            backend=backend,
            default_root_dir=str(tmp_path),
            **dict.fromkeys(("enable_progress_bar", "logger", "enable_checkpointing"), False),
        )
        result = made.fit(PersonalizedMoE(expert, task=task), make())["FedAvg"]
        assert result.spread("global_test_loss").std == 0
        models.append(made.client_module("FedAvg", 0).state_dict())
    torch.testing.assert_close(*models)


def test_a_partition_without_classes_is_a_table_and_a_figure_of_sizes():
    datamodule = data()
    datamodule.setup()
    assert partition_table(datamodule).startswith("3 clients, 30 training samples, 9 global test samples")
    assert len(partition_figure([*partition_rows(datamodule)]).axes) == 1
    assert [row["train"] for row in partition_rows(datamodule)] == datamodule.train_samples.sizes.tolist()


def test_clusters_are_chosen_by_the_loss_of_the_task(tmp_path):
    torch.manual_seed(0)
    module = clustered(gate=only(0), expert=nn.Linear(4, 1), task="regression").float()
    made = Federation(
        [Phase("IFCA", EpsilonGreedyIFCA(), rounds=2)],
        {"accelerator": "cpu", "max_epochs": 1},
        default_root_dir=str(tmp_path),
        **dict.fromkeys(("enable_progress_bar", "logger", "enable_checkpointing"), False),
    )
    made.fit(module, data())
    losses = [client.metrics["local_test_loss"] for client in made.results["IFCA"].clients]
    assert len(losses) == 3 and all(math.isfinite(loss) for loss in losses)


class Plain(LightningModule):
    """A user's own module, which has no loss of outputs."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x):
        return self.layer(x)[:, 0]

    def training_step(self, batch, batch_idx):
        return (self(batch[0]) - batch[1]).abs().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_methods_of_a_run_may_differ_in_their_metrics(tmp_path, capsys):
    made = Federation(
        [Phase("plain", FedAvg(), model=Plain()), Phase("FedAvg", FedAvg("global_expert.*"), gate=GlobalOnly())],
        {"accelerator": "cpu", "max_epochs": 1},
        default_root_dir=str(tmp_path),
        metrics={"rmse": MeanSquaredError(squared=False)},
        **dict.fromkeys(("enable_progress_bar", "logger", "enable_checkpointing"), False),
    )
    results = made.fit(model(), data())
    assert "local test rmse" in capsys.readouterr().out
    for name in ("rounds.csv", "summary.csv"):
        plain, mixture = rows(made, name)
        assert plain["global_test_loss_mean"] == "" and float(plain["global_test_rmse_mean"]) > 0
        assert float(mixture["global_test_loss_mean"]) == results["FedAvg"].spread("global_test_loss").mean
