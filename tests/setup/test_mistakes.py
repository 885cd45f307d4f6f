"""Mistakes of newcomers in Python: each is one sentence before any training, with the value and what is allowed."""

import logging
from functools import partial

import numpy as np
import pytest
import torch
from helpers.data import Own as OwnData
from helpers.data import refusal_of
from helpers.ingredients import Own
from helpers.runs import WithDropout, data, federation, model
from lightning.pytorch import LightningDataModule, LightningModule
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.utils.data import DataLoader, TensorDataset

from fedmoe_pl import Federation, PersonalizedMoE, Phase, Select, Train
from fedmoe_pl.algorithms import FedAvg, FedKD, FineTuning, HetLoRA, KNNPer, Local
from fedmoe_pl.callbacks import GateMonitor
from fedmoe_pl.data import Arrays, Digits, FromDataModule, FromDatasets, Partitioner
from fedmoe_pl.models import SmallMLP, TwoConvCNN
from fedmoe_pl.phases.participation import evaluated_clients

sgd = partial(SGD, lr=0.1)
TENSORS = TensorDataset(torch.rand(8, 5), torch.arange(8) % 3)


def of_phase(**arguments):
    return lambda: Phase(**{"name": "p", "algorithm": FedAvg(), **arguments})


def of_train(**arguments):
    return of_phase(train=Train(**arguments))


def checked(module, *phases, datamodule=None, **arguments):
    """What checks a run of these phases, by default one of FedAvg."""

    def check():
        Federation([*phases] or [Phase("p", FedAvg())], logger=False, **arguments).check(module(), datamodule or data())

    return check


class ForgetsToAsk(LightningModule):
    def __init__(self):
        self.layer = 3


class Masks(FedAvg):
    def client_samples(self, client):
        return client.samples > 0


class Needs(FedAvg):
    needs = ("clases",)  # pyright: ignore[reportAssignmentType]


class PartsAsTuple(FedAvg):
    parts = ("gate",)  # pyright: ignore[reportAssignmentType]


class OneClientFewer(Partitioner):
    def __call__(self, labels, num_clients, rng, client_ids=None):
        return np.array_split(np.arange(len(labels)), num_clients)[:-1]


class NumberedClients(Partitioner):
    def __call__(self, labels, num_clients, rng, client_ids=None):
        return dict(enumerate(np.array_split(np.arange(len(labels)), num_clients)))


def plain():
    return Own(WithDropout(), sgd)


def with_loss(loss, **arguments):
    return checked(lambda: PersonalizedMoE(WithDropout(), optimizer=sgd, loss=loss, **arguments))


def images(*shape, classes=3):
    x = torch.zeros(24, *shape, dtype=torch.uint8)
    return OwnData(Arrays(x, torch.arange(24) % classes, x, torch.arange(24) % classes), num_clients=2)


def of_images(network, *shape, classes=3):
    return checked(lambda: PersonalizedMoE(network(), optimizer=sgd), datamodule=images(*shape, classes=classes))


def per_sample(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def targets(y):
    dataset = TensorDataset(torch.rand(24, 5), y)
    return checked(model, datamodule=FromDatasets(dataset, dataset, num_clients=2))


def few_to_validate():
    """Client 2 has no validation samples."""
    return data(sizes=(20, 20, 2), validation_fraction=0.2)


def selecting(clients):
    return Phase("p", FedAvg(), clients=clients, select=Select("validation_loss"))


def one_evaluated(phase, datamodule):
    """With a seed by which it is client 2 that is evaluated."""
    seed = next(seed for seed in range(99) if evaluated_clients(3, 1, seed) == [2])
    return checked(model, phase, datamodule=datamodule, evaluation_cohort_size=1, seed=seed)


CLASSES, LOCAL = torch.arange(24) % 3, "Local with a start, which trains it further"
MISTAKES = [
    ("start", "name of an earlier phase", of_phase(start=["FedAvg"])),
    ("rounds", "an integer", of_phase(rounds=None)),
    ("clients", "a list of ids", of_phase(clients=1)),
    ("select.from_round", "a number", of_phase(select=Select("global_test", from_round=None))),  # pyright: ignore
    ("select.min_delta", "a number", of_phase(select=Select("global_test", min_delta=None))),  # pyright: ignore
    ("select.monitor", "another metric", checked(model, selecting([2]), datamodule=few_to_validate())),
    ("evaluation_cohort_size", "larger", one_evaluated(selecting([0, 2]), few_to_validate())),
    ("server_optimizer", "partial(torch.optim.SGD", of_phase(server_optimizer="FedAdam")),
    ("train.optimizer", "partial(torch.optim.SGD", of_train(optimizer=SGD([nn.Parameter(torch.ones(1))], lr=0.1))),
    ("train.lr_scheduler", "partial(StepLR", of_train(lr_scheduler="cosine")),
    ("train.callbacks", "a Callback of Lightning", of_train(callbacks=[GateMonitor()])),
    ("train.callbacks", "a list", of_train(callbacks=GateMonitor())),
    ("train.trainer", "a dict", of_train(trainer=["max_epochs"])),
    ("needs", "one of all_clients", of_phase(algorithm=Needs())),
    ("parts", "a Parts", of_phase(algorithm=PartsAsTuple())),
    ("shared", "a pattern of names", lambda: FedAvg(shared=nn.Linear(1, 1))),  # pyright: ignore[reportArgumentType]
    ("ranks", "a list", lambda: HetLoRA(4)),  # pyright: ignore[reportArgumentType]
    ("seed", "an integer", checked(model, seed=None)),
    ("model", "super().__init__()", checked(ForgetsToAsk)),
    ("algorithm", "client_samples returns indices", checked(model, Phase("p", Masks()))),
    ("algorithm", LOCAL, checked(plain, Phase("a", FedAvg()), Phase("p", FineTuning()))),
    ("algorithm", "one with expert ''", checked(plain, Phase("a", FedAvg()), Phase("p", KNNPer()))),
    ("algorithm", "the parts that the model has", checked(plain, Phase("p", FedKD()))),
    ("loss", "gives the mean", with_loss(per_sample, task="multiclass")),
    ("loss", "gives the mean", with_loss(lambda outputs, targets: None, task="multiclass")),
    ("global_expert", "8 x 8 pixels, such as SmallMLP", of_images(TwoConvCNN, 1, 8, 8)),
    ("global_expert", "28 x 30 pixels", of_images(TwoConvCNN, 1, 28, 30)),
    ("in_channels", "1, with image_size 28 and num_classes 12", of_images(TwoConvCNN, 1, 28, 28, classes=12)),
    ("in_features", "192, with num_classes 12", of_images(SmallMLP, 3, 8, 8, classes=12)),
    ("shape of a sample", "(1, 28, 28), with the channels first", of_images(TwoConvCNN, 28, 28, 1)),
    ("task", "fits the targets", targets(F.one_hot(CLASSES))),
    ("datamodule", "a LightningDataModule", lambda: FromDataModule(LightningDataModule, num_clients=2)),  # pyright: ignore
    ("train_dataset", "a dataset", lambda: FromDatasets((np.ones(3), np.ones(3)), num_clients=2)),  # pyright: ignore
    ("test_dataset", "a dataset", lambda: FromDatasets(TENSORS, DataLoader(TENSORS), num_clients=2)),  # pyright: ignore
    ("what load returns", "Arrays or", lambda: OwnData(None, num_clients=2)),  # pyright: ignore[reportArgumentType]
    ("x_train", "torch.as_tensor", lambda: OwnData(Arrays(*[np.ones((4, 4))] * 4), num_clients=2)),  # pyright: ignore
    ("what it returns", "each of 3 clients", lambda: Digits(num_clients=3, partitioner=OneClientFewer())),
    ("client_names", "a text", lambda: Digits(num_clients=3, partitioner=NumberedClients())),
]


@pytest.mark.parametrize(("argument", "allowed", "make"), MISTAKES)
def test_a_mistake_is_refused_with_what_is_allowed(argument, allowed, make, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refusal = refusal_of(make)
    assert refusal.argument == argument and allowed in refusal.allowed
    assert not list(tmp_path.rglob("version_*"))


def test_classes_in_other_shapes_are_told_how_to_become_classes():
    assert "y.argmax(1)" in refusal_of(targets(F.one_hot(CLASSES))).because
    assert "y.squeeze(1)" in refusal_of(targets(CLASSES[:, None])).because


def test_the_log_says_where_a_phase_starts_from(tmp_path, caplog):
    phases = [Phase("A", FedAvg()), Phase("B", Local(), start="A"), Phase("C", Local(), start={"local_expert": "B"})]
    with caplog.at_level(logging.INFO):
        federation(tmp_path, phases).fit(model(), data())
    assert [each for each in caplog.messages if each.startswith("start: ")] == [
        "start: B from A; C from B (local_expert)"
    ]


def test_a_run_without_results_of_the_phases_is_not_tested(tmp_path):
    run = federation(tmp_path, [Phase("A", FedAvg(), evaluate=False)])
    run.fit(model(), data())
    for command in (run.test, run.predict):
        assert refusal_of(lambda command=command: command(model(), data())).argument == "phases"
