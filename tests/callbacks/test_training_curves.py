"""What clients log in their training, as curves in the loggers of the run."""

import csv
from functools import partial

import pytest
import torch
from helpers import OneWeight, TensorData, blobs, mixture, run
from helpers.runs import Kill, data, federation, model, phases, resumed_after
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import DataLoader, TensorDataset

from fedmoe_pl import Phase, Train
from fedmoe_pl.algorithms import FedAvg, FedProx, Local
from fedmoe_pl.callbacks import AccuracyMonitor
from fedmoe_pl.models import LinearGate

sgd = partial(torch.optim.SGD, lr=0.2)


def curves(path, method="", steps="step"):
    """The values of each metric by step, of one ``metrics.csv``."""
    (file,) = path.rglob("metrics.csv")
    rows = [*csv.DictReader(file.read_text().splitlines())]
    names = [name for name in rows[0] if name.startswith((f"{method}train_", f"{method}validation_"))]
    return {
        name.removeprefix(method): {int(row[steps]): float(row[name]) for row in rows if row[name]} for name in names
    }


def plain(path, samples, epochs):
    """The curves of a plain Trainer whose epoch is one batch."""
    logger = CSVLogger(path)
    trainer = Trainer(
        max_epochs=epochs, logger=logger, log_every_n_steps=1, enable_checkpointing=False, enable_progress_bar=False
    )
    batches = DataLoader(TensorDataset(*samples), batch_size=len(samples[1]))
    trainer.fit(mixture(LinearGate(5), optimizer=sgd), batches)
    return curves(path)


@pytest.mark.filterwarnings("ignore")  # of Lightning, of few batches and workers
def test_the_curves_are_those_of_plain_trainers_and_their_mean(tmp_path):
    samples = blobs(batch_size=99)
    trainer = {"logger": True}
    phase = Phase("Local", Local(), train=Train(max_epochs=4, trainer=trainer))
    logger, monitor = CSVLogger(tmp_path / "run"), AccuracyMonitor([1])
    run([phase], mixture(LinearGate(5), optimizer=sgd), samples, tmp_path, logger=logger, callbacks=[monitor])
    found = curves(tmp_path / "run", "Local/")
    parts = [(samples.x[some], samples.y[some]) for some in samples.train_samples]
    expected = [plain(tmp_path / f"plain_{client}", part, 4) for client, part in enumerate(parts)]
    names = ["train_loss", "train_accuracy", "train_gate/global_expert"]
    assert {*found} == {*names, *(f"{name}/client_001" for name in names)} and {*expected[0]} == {*names}
    for name in names:
        of_epochs = zip(*(each[name].values() for each in expected), strict=True)
        assert [*found[name]] == [1, 2, 3, 4], "steps are epochs"
        assert [*found[name].values()] == pytest.approx([sum(values) / 3 for values in of_epochs])
        assert [*found[f"{name}/client_001"].values()] == pytest.approx([*expected[1][name].values()])


@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0.0)], ids=["its own loss", "an algorithm's loss"])
def test_steps_go_on_over_rounds_as_in_a_training_without_pauses(algorithm, tmp_path):
    samples = blobs((20,), batch_size=99, validation_fraction=0.4)
    phase = Phase("all", algorithm, rounds=3, train=Train(trainer={"logger": True, "limit_val_batches": 1.0}))
    run([phase], mixture(LinearGate(5), optimizer=sgd), samples, tmp_path, logger=CSVLogger(tmp_path / "run"))
    found = curves(tmp_path / "run", "all/")
    some = samples.train_samples[0]
    expected = plain(tmp_path / "plain", (samples.x[some], samples.y[some]), 6)
    for name, values in expected.items():
        assert [*found[name]] == [1, 2, 3, 4, 5, 6]
        assert [*found[name].values()] == pytest.approx([*values.values()])
        assert len(found[name.replace("train", "validation")]) == 6


def test_an_epoch_is_the_mean_of_the_steps_that_a_module_of_your_own_logs(tmp_path):
    x = torch.tensor([[1.0, 0.0], [1.0, 2.0], [1.0, 4.0]])
    samples = TensorData(x, torch.zeros(3, 1), [[0, 1, 2]], dtype=torch.float64, batch_size=1)
    phase = Phase("own", Local(), evaluate=False, train=Train(trainer={"logger": True}))
    run([phase], OneWeight(lr=0.0, start=1.0), samples, tmp_path, logger=CSVLogger(tmp_path / "run"))
    assert curves(tmp_path / "run", "own/") == {"train_loss": {1: pytest.approx(11 / 6), 2: pytest.approx(11 / 6)}}


def rate_and_loss(run, method):
    log = EventAccumulator(str(run.run_dir / method)).Reload()
    return [[*{event.step: event.value for event in log.Scalars(tag)}.items()] for tag in ("lr-SGD", "train_loss")]


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_curves_of_a_killed_run_go_on_and_workers_send_theirs(devices, tmp_path):
    """A phase of several rounds has more epochs than rounds."""
    trainer = {"accelerator": "cpu", "logger": True, "max_epochs": 2, "devices": devices}
    once = federation(tmp_path / "once", phases()[:2], trainer={**trainer, "devices": 1}, logger=True)
    once.fit(model(), data())

    def make(**kwargs):
        return federation(tmp_path, phases()[:2], trainer=trainer, logger=True, **kwargs)

    resumed = resumed_after(Kill("on_server_update", 4), make, model, data)
    for method in ("Local", "FedAvg"):
        assert rate_and_loss(resumed, method) == rate_and_loss(once, method)
    assert [step for step, _ in rate_and_loss(resumed, "FedAvg")[0]] == [1, 2, 3, 4, 5, 6, 7, 8]
