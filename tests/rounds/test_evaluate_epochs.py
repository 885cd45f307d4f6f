"""Personalization as a curve over its epochs."""

import csv
from dataclasses import replace

import pytest
import torch
from helpers import OneWeight, TensorData, assert_same_bits, blobs, mixture
from helpers.backends import local_training, train
from helpers.runs import Kill, Notes, data, federation, model, phases
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torchmetrics import MeanAbsoluteError

from fedmoe_pl import Evaluate, Federation, Phase, Train
from fedmoe_pl.algorithms import FedAvg, Local
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.models import LocalOnly

EPOCHS = 5


def personalization(epochs=EPOCHS, every=None):
    fedavg, expert, mixture = phases()[1:]
    for phase in (expert, mixture):
        phase.train.max_epochs, phase.evaluate = epochs, Evaluate(every_n_epochs=every)
    return [fedavg, expert, mixture]


def fitted(path, *callbacks, phases, ckpt_path=None, **kwargs):
    run = federation(path, phases=phases, callbacks=[*callbacks], **{"logger": True, **kwargs})
    run.fit(model(), data(), ckpt_path=ckpt_path)
    return run


def points(run, method, tag):
    log = EventAccumulator(str(run.run_dir / method)).Reload()
    return [(event.step, event.value) for event in log.Scalars(tag)]


@pytest.fixture(scope="module")
def curve(tmp_path_factory):
    return fitted(tmp_path_factory.mktemp("curve"), phases=personalization(every=2))


@pytest.mark.slow
def test_every_point_is_the_result_of_a_phase_of_so_many_epochs(curve, tmp_path):
    means, weights = (points(curve, "PFL-MF", tag) for tag in ("global_test/mean", "mean_gate_weight/global"))
    assert [step for step, _ in means] == [step for step, _ in weights] == [0, 2, 4, 5]
    whole = fitted(tmp_path, phases=personalization(), logger=False)
    assert [evaluation.clients for evaluation in whole.results.values()].__repr__() == [
        evaluation.clients for evaluation in curve.results.values()
    ].__repr__(), "the result has the same bits"
    experts = personalization(epochs=2)[:2]
    two = fitted(tmp_path, phases=experts, logger=False).results["PFL-FB"].spread("global_test").mean
    assert dict(points(curve, "PFL-FB", "global_test/mean"))[2] == pytest.approx(two)
    assert [step for step, _ in points(curve, "PFL-FB", "resources/flops")] == [5], "a forgotten epoch costs nothing"
    assert [row["round"] for row in curve.run.rows if row["method"] == "PFL-FB"] == [1]


@pytest.mark.slow
def test_the_weights_of_samples_are_shown_before_and_after_training(curve):
    """TensorBoard's page Distributions is blank for a histogram of one step."""
    log = EventAccumulator(str(curve.run_dir / "PFL-MF")).Reload()
    (tag, *_) = [tag for tag in log.Tags()["tensors"] if tag.startswith("weight_of_samples/")]
    assert [event.step for event in log.Tensors(tag)] == [0, 5]


@pytest.mark.slow
def test_only_the_training_that_counts_is_logged_by_the_clients(tmp_path):
    trainer = {"accelerator": "cpu", "logger": CSVLogger(tmp_path / "clients"), "callbacks": [LearningRateMonitor()]}
    fitted(tmp_path, phases=personalization(every=2), trainer={**trainer, "log_every_n_steps": 1}, logger=False)
    for phase in ("PFL-FB", "PFL-MF"):
        (text, *_) = [path.read_text() for path in (tmp_path / "clients").rglob(f"{phase}/client_000/*/metrics.csv")]
        rows = [*csv.DictReader(text.splitlines())]
        assert [row["epoch"] for row in rows if row["train_loss"]] == [str(epoch) for epoch in range(EPOCHS)]


def test_only_the_training_that_counts_writes_checkpoints_and_profiles(tmp_path):
    files = {"callbacks": [ModelCheckpoint(save_top_k=-1)], "enable_checkpointing": True, "profiler": "simple"}
    trainer = {"accelerator": "cpu", **files, "default_root_dir": str(tmp_path / "clients")}
    evaluate = Evaluate(every_n_epochs=1)
    phase = Phase("Local", Local(), gate=LocalOnly(), train=Train(max_epochs=3), evaluate=evaluate)
    federation(tmp_path, [phase], trainer=trainer).fit(mixture(), blobs((4,)))  # one batch
    (folder,) = (tmp_path / "clients").rglob("round_0001")
    assert {path.name for path in folder.rglob("*.ckpt")} == {f"epoch={n}-step={n + 1}.ckpt" for n in range(3)}
    assert (folder / "fit-profile.txt").read_text().count("Profiler Report") == 1


@pytest.mark.slow
def test_the_curve_of_a_killed_run_goes_on(curve, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        fitted(tmp_path, Kill("on_evaluation_end", 7), phases=personalization(every=2))
    resumed = fitted(tmp_path, phases=personalization(every=2), ckpt_path="last")
    for method in ("PFL-FB", "PFL-MF"):
        expected = points(curve, method, "reweighted_test/mean")
        assert [*dict(points(resumed, method, "reweighted_test/mean")).items()] == expected


def test_only_clients_that_the_round_trains_are_trained_on_the_way_to_it(tmp_path):
    seen = Notes(on_evaluation_end=lambda run, phase, found: [client.global_test for client in found.clients])
    evaluate = Evaluate(every_n_epochs=2)
    some = Phase("Local", Local(), gate=LocalOnly(), clients=[0], train=Train(max_epochs=3), evaluate=evaluate)
    federation(tmp_path, [some], callbacks=[seen]).fit(mixture(), blobs())
    first, between, last = seen.noted
    assert first[1:] == between[1:] == last[1:], "clients 1 and 2 do not take part"
    assert first[0] != between[0]


class Annealed(OneWeight):
    """Its learning rate falls linearly to 0 in all epochs of its Trainer."""

    def forward(self, x):
        return self.weight.expand(len(x), 1)

    def configure_optimizers(self):
        optimizer, epochs = super().configure_optimizers(), self.trainer.max_epochs
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 - epoch / epochs)]


def test_points_are_on_the_way_to_the_result_where_a_schedule_ends_with_the_phase(tmp_path):
    seen = Notes(on_evaluation_end=lambda run, phase, found: found.clients[0].metrics["global_test_error"])
    data = TensorData(torch.tensor([[4.0, 5.0]]), torch.zeros(1, 1), [[0]], dtype=torch.float64)
    phase = Phase("Local", Local(), train=Train(max_epochs=4), evaluate=Evaluate(every_n_epochs=1))
    metrics = {"error": MeanAbsoluteError()}
    Federation([phase], callbacks=[seen], metrics=metrics, default_root_dir=str(tmp_path)).fit(Annealed(), data)
    weights = [0.0]
    for epoch in range(4):
        weights.append(weights[-1] + 0.05 * (1 - epoch / 4) * 4 * (5 - weights[-1]))
    assert seen.noted == pytest.approx(weights)


@pytest.mark.parametrize("backend", [TrainerBackend(), StackedBackend()], ids=["alone", "stacked"])
def test_clients_of_every_backend_stop_after_some_epochs(backend):
    training = local_training(mixture(), FedAvg(), blobs((4, 9)), max_epochs=4)
    stopped, shorter = (
        train(backend, replace(training, stop_after=2)),
        local_training(mixture(), FedAvg(), blobs((4, 9))),
    )
    assert_same_bits(stopped[0].sent, train(backend, shorter)[0].sent)
