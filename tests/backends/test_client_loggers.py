"""The loggers of the clients' own Trainers."""

import copy
import csv
import pickle
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import blobs, mixture, run
from helpers.runs import federation
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger

from fedmoe_pl import Federation, Phase, Train
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends.client_loggers import SilentLogger, client_loggers, finish
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data.client_names import ClientNames


def named(logger, **trainer):
    training = SimpleNamespace(
        phase_name="my phase",
        run_name="digits/version_2",
        trainer={"logger": logger, **trainer},
        datamodule=SimpleNamespace(client_names=ClientNames.numbers(4)),
    )
    return client_loggers(training, SimpleNamespace(id=3, round=11))


NAME = Path("my phase", "client_003", "round_0012")


@pytest.mark.parametrize("made", [CSVLogger, TensorBoardLogger])
def test_a_logger_s_folder_is_that_of_phase_client_and_round(made, tmp_path):
    for version, folder in ((None, "digits/version_2"), (7, "version_7"), ("mine", "mine")):
        given = made(tmp_path, name="logs", version=version)
        (logger,) = named(given)
        assert Path(logger.log_dir) == tmp_path / "logs" / folder / NAME
        assert given._version == version, "the next client's copy begins anew"


def test_true_and_false_are_none_of_a_client_s_own():
    assert named(True) == [] and named(False) == [] and named([]) == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of MLflow itself
def test_runs_of_mlflow_are_named(tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    given = MLFlowLogger(tracking_uri=f"file:{tmp_path}")
    (logger,) = named([given])
    assert (logger._run_name, given._run_name) == (str(NAME), None)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_runs_of_weights_and_biases_are_named_and_none_is_opened(tmp_path):
    wandb = pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger

    given = WandbLogger(name="mine", offline=True, save_dir=tmp_path)
    (logger,) = named([given])
    assert (logger._wandb_init["name"], given._wandb_init["name"]) == (str(NAME), "mine")
    assert wandb.run is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_clients_that_log_to_the_federation_s_run_of_weights_and_biases_have_their_names_before_their_metrics(tmp_path):
    wandb = pytest.importorskip("wandb")
    from lightning.pytorch.loggers import WandbLogger

    of_run = WandbLogger(name="federation", offline=True, save_dir=tmp_path)
    of_run.log_metrics({"FedAvg/reweighted_test/mean": 0.5}, step=1)
    (logger,) = named(WandbLogger(offline=True, save_dir=tmp_path), default_root_dir=str(tmp_path))
    logger.log_metrics({"validation_loss": 2.0}, step=4)
    assert wandb.run.summary[f"{NAME}/validation_loss"] == 2
    assert Path(logger.save_dir) == tmp_path / "digits/version_2" / NAME, "of checkpoints"
    finish([logger])
    assert wandb.run is of_run.experiment
    wandb.finish()


@pytest.mark.slow
def test_every_client_of_every_round_has_a_folder_of_its_own(tmp_path):
    trainer = {"logger": CSVLogger(tmp_path / "clients"), "limit_val_batches": 1.0, "log_every_n_steps": 1}
    phases = [
        Phase(name, FedAvg(), rounds=n, train=Train(max_epochs=1, trainer=trainer))
        for name, n in (("one", 2), ("two", 1))
    ]
    for _ in range(2):
        run(phases, mixture(), blobs(validation_fraction=0.3), tmp_path)
    found = sorted(tmp_path.rglob("metrics.csv"))
    folders = [f"one/client_{c:03d}/round_{r:04d}" for c in range(3) for r in (1, 2)]
    folders += [f"two/client_{c:03d}/round_0001" for c in range(3)]
    below = tmp_path / "clients/lightning_logs" / tmp_path.name / "federation"
    runs = [below / f"version_{n}" for n in (0, 1)]
    assert found == [run / folder / "metrics.csv" for run in runs for folder in folders]
    assert "validation_loss" in found[0].read_text()


def test_every_client_of_every_round_has_its_checkpoints_without_a_logger(tmp_path):
    trainer = {"enable_checkpointing": True, "default_root_dir": str(tmp_path / "clients")}
    phase = Phase("one", FedAvg(), rounds=2, train=Train(callbacks=[ModelCheckpoint()], trainer=trainer))
    run([phase], mixture(), blobs(), tmp_path)
    (below,) = (tmp_path / "clients").glob("**/version_0")
    found = sorted(str(path.parent.relative_to(below)) for path in tmp_path.rglob("*.ckpt"))
    assert found == [f"one/client_{c:03d}/round_{r:04d}/checkpoints" for c in range(3) for r in (1, 2)]


@pytest.mark.parametrize("of_phase", [True, False])
def test_one_folder_for_the_checkpoints_of_all_clients_is_refused(of_phase, tmp_path):
    trainer, callbacks = {"enable_checkpointing": True}, [ModelCheckpoint(dirpath=tmp_path / "here")]
    phase = Phase("one", FedAvg(), train=Train(callbacks=callbacks, trainer=trainer if of_phase else None))
    with pytest.raises(InvalidArgumentError, match=r"ModelCheckpoint\.dirpath is '.*here', but must be left out"):
        federation(tmp_path, [phase], trainer={"accelerator": "cpu", **trainer}).fit(mixture(), blobs())
    assert not list(tmp_path.rglob("version_*"))


def test_one_logger_for_the_federation_and_its_clients_is_refused(tmp_path):
    logger = CSVLogger(tmp_path)
    of_clients = {"trainer": {"logger": [CSVLogger(tmp_path), logger]}}
    sentence = "^Federation: logger is a CSVLogger, but must be another object than trainer.logger, "
    for given in (logger, [TensorBoardLogger(tmp_path), logger]):
        with pytest.raises(InvalidArgumentError, match=sentence):
            Federation([Phase("one", FedAvg())], logger=given, **of_clients)
        with pytest.raises(InvalidArgumentError, match=sentence):
            Federation([Phase("one", FedAvg()), Phase("two", FedAvg(), train=Train(**of_clients))], logger=given)
    assert Federation([Phase("one", FedAvg())], logger=CSVLogger(tmp_path), **of_clients)


def test_clients_of_mixtures_log_each_epoch_under_the_names_of_a_plain_trainer(tmp_path):
    trainer = {"logger": CSVLogger(tmp_path / "clients")}
    run([Phase("FedAvg", FedAvg(), train=Train(max_epochs=3, trainer=trainer))], mixture(), blobs(), tmp_path)
    (first, *_) = sorted(tmp_path.rglob("metrics.csv"))  # of 13 samples in batches of 4
    rows = [*csv.DictReader(first.read_text().splitlines())]
    for name in ("train_loss", "train_accuracy", "train_gate/global_expert"):
        assert [int(row["step"]) for row in rows if row[name]] == [3, 7, 11]


def test_a_silent_logger_takes_what_a_users_callback_logs_also_as_a_copy_or_in_a_worker():
    for logger in (SilentLogger(), copy.deepcopy(SilentLogger()), pickle.loads(pickle.dumps(SilentLogger()))):
        logger.experiment.add_scalar("loss", 1.0, 0)
        logger.log_metrics({"loss": 1.0}, step=0)
        assert isinstance(logger, SilentLogger)
