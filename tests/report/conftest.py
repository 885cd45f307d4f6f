import json
import shutil

import pytest
from helpers.reports import Page, csv_rows
from helpers.runs import data, federation, model

from fedmoe_pl.logs.summary import write_csv
from fedmoe_pl.report.pictures import Picture
from fedmoe_pl.report.report import report

CONFIG = {
    "seed_everything": 0,
    "model": {"class_path": "fedmoe_pl.PersonalizedMoE", "init_args": {"optimizer": {"init_args": {"lr": 0.1}}}},
    "data": {
        "class_path": "tests.TensorData",
        "init_args": {
            "num_clients": 3,
            "partitioner": {"class_path": "fedmoe_pl.data.Dirichlet", "init_args": {"alpha": 0.5}},
        },
    },
    "trainer": {"max_epochs": 1},
    "federation": {
        "name": "tiny",
        "phases": [
            {"name": "Local", "rounds": 1},
            {"name": "FedAvg", "rounds": 4, "algorithm": {"class_path": "FedAvg", "init_args": {"shared": "all"}}},
            {"name": "PFL-FB", "rounds": 1},
            {"name": "PFL-MF", "rounds": 1},
        ],
    },
}


@pytest.fixture(scope="session")
def finished(tmp_path_factory):
    """The folder of a finished run of four methods, with a configuration as if from the command line."""
    fed = federation(tmp_path_factory.mktemp("runs"), name="tiny", enable_checkpointing=False)
    fed.fit(model(), data())
    (fed.run_dir / "record.json").write_text(json.dumps(CONFIG))
    return fed.run_dir


@pytest.fixture
def copied(finished, tmp_path):
    """Copies the run, with another seed and another configuration, and other accuracies."""

    def copy(name, seed=0, change=lambda config: None, better=0.0):
        folder = tmp_path / "runs" / name / "version_0"
        shutil.copytree(finished, folder)
        config = json.loads((finished / "record.json").read_text())
        config["seed_everything"] = seed
        config["federation"]["name"] = name
        change(config)
        (folder / "record.json").write_text(json.dumps(config))
        if better:
            raise_accuracies(folder, better)
        return folder

    return copy


def raise_accuracies(folder, by):
    columns = {"rounds": "reweighted_test_mean", "summary": "reweighted_test_mean", "clients": "reweighted_test"}
    for name, column in columns.items():
        path = folder / f"{name}.csv"
        rows = csv_rows(path)
        write_csv(path, [row | {column: float(row[column]) + by} for row in rows])


@pytest.fixture
def written(tmp_path, monkeypatch):
    """Writes a report without pictures, which takes less time."""
    for name in ("curves_figure", "cost_figure", "distribution_figure", "gate_figure", "partition_figure"):
        monkeypatch.setattr(f"fedmoe_pl.report.page.{name}", lambda *arguments: None)
    monkeypatch.setattr("fedmoe_pl.report.page.picture", lambda name, caption, figure: Picture("a", caption, "", b""))

    def write(*arguments):
        output, markdown, *_ = report([*map(str, arguments), "--output", str(tmp_path / "page.html")])
        return Page(output.read_text()), markdown.read_text()

    return write
