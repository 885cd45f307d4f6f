"""Phases, rounds, selection, checkpoint and resume."""

import csv

import pytest
from helpers import blobs, mixture, phase, run
from helpers.backends import WithBatchNorm
from helpers.reports import csv_rows
from helpers.runs import assert_same, data, federation, model
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import CSVLogger
from torch import nn

from fedmoe_pl import Federation, PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg, Local
from fedmoe_pl.callbacks import ClientCheckpoint, GateMonitor
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import PredefinedIndices
from fedmoe_pl.models import ConstantGate


def test_files_name_every_number(tmp_path):
    run = federation(tmp_path, logger=CSVLogger(tmp_path / "log"))
    run.fit(model(), data(test_fraction=0.2, validation_fraction=0.2))
    rows = csv_rows(run.run_dir / "clients.csv")
    assert [row["method"] for row in rows] == [phase.name for phase in run.phases for _ in range(3)]
    assert {(row["method"], row["model"], row["evaluation_point"]) for row in rows} == {
        ("Local", "local expert", "after local training"),
        ("FedAvg", "global expert", "after aggregation"),
        ("PFL-FB", "local expert", "after local training"),
        ("PFL-MF", "mixture", "after local training"),
    }
    assert all(row["local_test"] and row["validation"] for row in rows)
    assert [bool(row["mean_gate_weight"]) for row in rows] == [False] * 9 + [True] * 3
    with (run.run_dir / "rounds.csv").open() as file:
        assert [(row["method"], row["round"]) for row in csv.DictReader(file)] == [
            ("Local", "1"),
            *(("FedAvg", str(i)) for i in (1, 2, 3, 4)),
            ("PFL-FB", "1"),
            ("PFL-MF", "1"),
        ]
    assert next((tmp_path / "log").rglob("metrics.csv")).is_file()


@pytest.mark.filterwarnings("ignore:Found .* module.s. in eval mode")
def test_batch_normalization_trains_with_a_last_batch_of_one_sample_but_not_with_one_sample(tmp_path):
    phases = [phase("FedAvg", FedAvg("global_expert.*"), rounds=2, gate=ConstantGate(1.0))]
    with pytest.raises(MisconfigurationException, match="client 2 has one training sample"):
        run(phases, mixture(expert=WithBatchNorm()), blobs((13, 9, 1)), tmp_path)
    server = run(phases, mixture(expert=WithBatchNorm()), blobs((13, 9)), tmp_path, 1).run.states["FedAvg"].server
    assert server["global_expert.extractor.1.num_batches_tracked"] == 2 * 3, "three whole batches, counted by client 0"
    expert = WithBatchNorm()
    expert.extractor[1].eval()  # which takes single samples
    server = run(phases, mixture(expert=expert), blobs((13, 9, 1)), tmp_path, 1).run.states["FedAvg"].server
    assert server["global_expert.extractor.1.num_batches_tracked"] == 0


def test_a_misspelt_method_or_client_is_refused(tmp_path):
    finished = run([phase("A", FedAvg()), phase("B", Local())], mixture(), blobs(), tmp_path)
    for read in (finished.client_module, finished.run.client_predictor):
        with pytest.raises(MisconfigurationException, match=r"^Federation: method is 'AA', but must be one of A, B\.$"):
            read("AA", 0)
        for client in (9, -1, 1.5):
            with pytest.raises(
                MisconfigurationException, match=rf"^Federation: client is {client}, but must be from 0 to 2\.$"
            ):
                read("A", client)
    del finished.run.states["A"], finished.run.states["B"]
    with pytest.raises(MisconfigurationException, match="method is 'A', but must be one of "):
        finished.client_module("A", 0)


def test_a_callback_of_the_user_takes_the_default_s_place(tmp_path):
    mine = GateMonitor(max_clients=2)
    monitors = [
        callback for callback in federation(tmp_path, callbacks=[mine]).callbacks if type(callback) is GateMonitor
    ]
    assert monitors == [mine]


@pytest.mark.slow
def test_only_the_named_methods_clients_are_written(tmp_path):
    run = federation(tmp_path, callbacks=[ClientCheckpoint(["PFL-FB"])])
    run.fit(model(), data())
    assert [path.name for path in (run.run_dir / "clients").iterdir()] == ["PFL-FB"]
    wrong = federation(tmp_path / "wrong", callbacks=[ClientCheckpoint(["PFL-FT"])])
    with pytest.raises(MisconfigurationException, match=r"methods is 'PFL-FT', but must be names of evaluated phases"):
        wrong.fit(model(), data())


def test_fitting_twice_gives_the_same_run_twice(tmp_path):
    federation_of_both = federation(tmp_path)
    runs = []
    for _ in range(2):
        federation_of_both.fit(model(), data())
        runs.append(federation_of_both.run)
    assert [run.folder.name for run in runs] == ["version_0", "version_1"]
    assert_same(runs[0].states, runs[1].states)
    for name in ("rounds.csv", "clients.csv", "summary.csv"):
        assert (runs[0].folder / name).read_bytes() == (runs[1].folder / name).read_bytes()


ONE = Phase("A", FedAvg())
OF_ANOTHER_KIND = {
    "phases is a Phase, but must be a list of Phases": lambda: Federation(ONE),
    "phases is ['A'], but must be": lambda: Federation(["A"]),
    "trainer is a Trainer, but must be a dict": lambda: Federation([ONE], trainer=Trainer(logger=False)),
    "backend is 'stacked', but must be a Backend": lambda: Federation([ONE], backend="stacked"),
    "callbacks is a Timer, but must be a list": lambda: Federation([ONE], callbacks=Timer()),
    "those of Lightning are arguments of the clients' trainer": lambda: Federation([ONE], callbacks=[Timer()]),
    "logger is 'tensorboard', but must be a Logger": lambda: Federation([ONE], logger="tensorboard"),
    "failures is {'dropout': 0.1}, but must be ClientFailures": lambda: Federation([ONE], failures={"dropout": 0.1}),
    "reports is None, but must be Reports": lambda: Federation([ONE], reports=None),
    "algorithm is the class FedAvg, but must be an Algorithm, such as FedAvg()": lambda: Phase("A", FedAvg),
    "algorithm is 'FedAvg', but must be": lambda: Phase("A", "FedAvg"),
    "gate is 'LinearGate', but must be": lambda: Phase("A", FedAvg(), gate="LinearGate"),
    "aggregation is 'median', but must be": lambda: Phase("A", FedAvg(), aggregation="median"),
    "global_expert is the class Linear, but must be a Module": lambda: PersonalizedMoE(nn.Linear),
    "local_expert is 'Linear', but must be": lambda: PersonalizedMoE(nn.Linear(5, 3), local_expert="Linear"),
    "gate is 'LinearGate', but must be a Gate, such as": lambda: PersonalizedMoE(nn.Linear(5, 3), gate="LinearGate"),
    "indices is 3, but must be lists": lambda: PredefinedIndices(3),
}


@pytest.mark.parametrize("sentence", OF_ANOTHER_KIND)
def test_an_argument_of_another_kind_is_refused_in_a_sentence(sentence):
    with pytest.raises(InvalidArgumentError) as error:
        OF_ANOTHER_KIND[sentence]()
    assert sentence in str(error.value)


def test_a_folder_of_runs_that_is_a_link_to_nothing_is_refused(tmp_path):
    (tmp_path / "runs").symlink_to(tmp_path / "gone")
    with pytest.raises(MisconfigurationException, match=r"default_root_dir must be a folder .* \(File exists\)"):
        federation(tmp_path / "runs", [ONE]).fit(model(), data())
