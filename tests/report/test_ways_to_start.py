"""However a run was started, its report is the same: from the command line, in Python, or some seeds of each."""

import json
import pathlib
from functools import partial

import pandas as pd
import pytest
import torch
from helpers.reports import markdown_tables
from torch import nn

from fedmoe_pl import Federation, PersonalizedMoE, Phase, Train
from fedmoe_pl.algorithms import FedAvg, FineTuning
from fedmoe_pl.checkpoints.configuration import recorded
from fedmoe_pl.cli.command_line import objects_of
from fedmoe_pl.data import Digits, Dirichlet
from fedmoe_pl.models import GlobalOnly, LocalOnly, SmallMLP
from fedmoe_pl.report.runs import RunFiles
from fedmoe_pl.report.settings import labels, settings_of


def from_yaml(seed, folder="runs", **changes):
    phases = [
        {"name": "FedAvg", "algorithm": {"class_path": "FedAvg", "init_args": {"shared": "global_expert.*"}}},
        {
            "name": "PFL-FT",
            "algorithm": "FineTuning",
            "gate": "LocalOnly",
            "train": {"optimizer": ADAM},
        },
    ]
    configuration = {
        "seed_everything": seed,
        "model": {"class_path": "PersonalizedMoE", "init_args": {"global_expert": "SmallMLP", "optimizer": SGD}},
        "data": {"class_path": "Digits", "init_args": {"num_clients": 3, "partitioner": DIRICHLET}},
        "trainer": {"max_epochs": 2, "accelerator": "cpu"},
        "federation": {"name": "a", "phases": phases, "default_root_dir": str(folder), **QUIET},
    }
    configuration["federation"]["phases"][0] |= {"gate": "GlobalOnly", "rounds": 2}
    return objects_of(["--config", json.dumps(configuration)])


def in_python(seed, folder="runs", width=64, lr=0.1):
    torch.manual_seed(seed)
    phases = [
        Phase("FedAvg", FedAvg("global_expert.*"), rounds=2, gate=GlobalOnly()),
        Phase(
            "PFL-FT",
            FineTuning(),
            gate=LocalOnly(),
            train=Train(optimizer=lambda parameters: torch.optim.Adam(parameters, lr=0.001)),
        ),
    ]
    trainer = {"max_epochs": 2, "accelerator": "cpu"}
    federation = Federation(phases, trainer, name="a", seed=seed, default_root_dir=folder, **QUIET)
    model = PersonalizedMoE(SmallMLP(hidden_features=width), optimizer=partial(torch.optim.SGD, lr=lr, momentum=0.5))
    return federation, model, Digits(num_clients=3, partitioner=Dirichlet(1))


QUIET = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False}
SGD = {"class_path": "torch.optim.SGD", "init_args": {"lr": 0.1, "momentum": 0.5}}
ADAM = {"class_path": "torch.optim.Adam", "init_args": {"lr": 0.001}}
DIRICHLET = {"class_path": "Dirichlet", "init_args": {"alpha": 1.0}}


def read(made, name="a"):
    """What a report would read of a run without results."""
    rows = [{"method": method} for method in ("FedAvg", "PFL-FT")]
    config = json.loads(json.dumps(recorded(*made), default=str))
    return RunFiles(pathlib.Path(name, "version_0"), rows, [], rows, [], [], config, {})


@pytest.mark.slow
def test_the_records_of_both_ways_are_equal():
    """Also where an integer stands for a float, but not where both have a meaning: 1 client, and 1.0 for all."""
    ours, theirs = read(in_python(3)).config, read(from_yaml(3)).config
    assert ours == theirs and json.dumps(ours, sort_keys=True) == json.dumps(theirs, sort_keys=True)
    one, everyone = in_python(0), in_python(0)
    one[0].phases[0].clients_per_round = 1
    assert len(settings_of([read(one), read(everyone)])[0]) == 2


def test_runs_made_in_python_are_told_apart_by_what_differs():
    same, other_width, other_rate = (read(in_python(seed=1)), read(in_python(2, width=32)), read(in_python(2, lr=0.2)))
    runs = [read(in_python(0)), same, other_width, other_rate]
    settings, left_out = settings_of(runs)
    assert [setting.runs for setting in settings] == [[runs[0], same], [other_width], [other_rate]] and not left_out
    assert labels("FedAvg", settings[:2]) == ["FedAvg (hidden_features 64)", "FedAvg (hidden_features 32)"]
    assert labels("FedAvg", settings[::2]) == ["FedAvg (lr 0.1)", "FedAvg (lr 0.2)"]


WIDTH = 8


class Net(nn.Module):
    """What it makes does not follow from its arguments."""

    def __init__(self, classes):
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, WIDTH), nn.Linear(WIDTH, classes))


def test_modules_whose_parts_differ_are_told_apart(monkeypatch):
    def made():
        federation, _, data = in_python(0)
        return read((federation, PersonalizedMoE(Net(10), optimizer=partial(torch.optim.SGD, lr=0.1)), data))

    first, same = made(), made()
    monkeypatch.setattr(f"{__name__}.WIDTH", 9)
    assert len(settings_of([first, same])[0]) == 1 and len(settings_of([first, made()])[0]) == 2


@pytest.mark.slow
def test_tables_over_seeds_from_python_from_yaml_and_mixed_are_equal(written, tmp_path):
    ways = {"python": [in_python, in_python], "yaml": [from_yaml, from_yaml], "mixed": [in_python, from_yaml]}
    tables = {}
    for name, makes in ways.items():
        for seed, make in enumerate(makes):
            federation, model, data = make(seed, tmp_path / name)
            torch.manual_seed(seed)  # the command line draws the initial weights from other random numbers
            for parameter in model.parameters():
                nn.init.normal_(parameter, std=0.1)
            federation.fit(model, data)
        _, text = written(tmp_path / name, "--baseline", "FedAvg")
        (tables[name],) = markdown_tables(text)
        assert "2 seeds" in text and "sample standard deviation over seeds" in text
    assert tables["python"] == tables["yaml"] == tables["mixed"]
    rows = pd.concat(map(pd.read_csv, (tmp_path / "python").rglob("summary.csv"))).groupby("method", sort=False)
    column = 100 * rows["reweighted_test_mean"].agg(["mean", "std"])
    expected = [f"{mean:.2f} ± {std:.2f}" for mean, std in column.itertuples(index=False)]
    assert [row[1] for row in tables["python"][1:]] == expected
