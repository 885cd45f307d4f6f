"""A client with a loss that is not finite fails, also if its parameters stay finite."""

import math

import pytest
import torch
from helpers import EveryBatch
from helpers.reports import csv_rows
from helpers.runs import data, federation, model
from lightning.pytorch import Callback

from fedmoe_pl import PersonalizedMoE, Phase, Train
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.models import ConstantGate, SmallMLP

SIZES = [20, 20, 20, 20]


class Offset(FedAvg):
    """FedAvg with a constant for the loss, infinite for client 2, which has no influence on gradients."""

    def client_init(self, client, sent):
        client.module.offset = math.inf if client.id == 2 else 0.0
        return {**super().client_init(client, sent), "offset": torch.tensor(client.module.offset)}


class WithOffset(Offset):
    """Adds it to the loss."""

    def client_loss(self, module, batch, constants):
        return super().client_loss(module, batch, constants) + constants["offset"]


class EveryEpoch(Callback):
    """Needs a Trainer of each client."""

    def on_train_epoch_end(self, trainer, pl_module):
        """Does nothing."""


class OwnStep(PersonalizedMoE):
    """A user's module with a training step of its own, which adds it."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)[0] + self.offset


PATHS = {
    "one Trainer for small clients": (TrainerBackend, [], PersonalizedMoE),
    "one training step per epoch": (TrainerBackend, [EveryEpoch()], PersonalizedMoE),
    "one training step per batch": (TrainerBackend, [EveryBatch()], PersonalizedMoE),
    "a training step of the user": (TrainerBackend, [], OwnStep),
    "stacked": (StackedBackend, [], PersonalizedMoE),
}


@pytest.mark.parametrize("path", PATHS)
def test_a_client_whose_loss_is_infinite_is_left_out(path, tmp_path):
    backend, callbacks, module_class = PATHS[path]
    algorithm = Offset("*") if module_class is OwnStep else WithOffset("*")
    phase = Phase("FedAvg", algorithm, 1, gate=ConstantGate(0.5), train=Train(callbacks=callbacks))
    run = federation(tmp_path, [phase], backend=backend())
    module = module_class(SmallMLP(5, 8, num_classes=3), optimizer=model().optimizer)
    with pytest.warns(UserWarning, match="client 2 is left out: a loss of its training is not finite$"):
        run.fit(module, data(sizes=SIZES))
    assert [row["failed"] for row in csv_rows(run.run_dir / "rounds.csv")] == ["1"]
