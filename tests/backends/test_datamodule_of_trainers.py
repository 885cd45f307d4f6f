"""What clients train with, their modules and callbacks, finds the federation's data module in the Trainer."""

from functools import partial

import pytest
import torch
from helpers import EveryBatch, OneWeight, TensorData, blobs, mixture, two_quadratics
from helpers.runs import federation
from helpers.workers import TwoInThisProcess
from lightning.pytorch import Callback

from fedmoe_pl import PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import AutoBackend


class Noting(Callback):
    """Notes the number of samples of the data module, in whatever hook comes first and last."""

    def setup(self, trainer, pl_module, stage):
        sizes.append(len(trainer.datamodule.y))

    def on_fit_end(self, trainer, pl_module):
        sizes.append(len(pl_module.trainer.datamodule.y))


class InItsLoss(PersonalizedMoE):
    def loss(self, batch):
        sizes.append(len(self.trainer.datamodule.y))
        return super().loss(batch)


class InItsStep(OneWeight):
    def training_step(self, batch, batch_idx):
        sizes.append(len(self.trainer.datamodule.y))
        return super().training_step(batch, batch_idx)


class SetUpOnce(TensorData):
    """Data that note which of their hooks are called."""

    calls = ()

    def prepare_data(self):
        self.calls = (*self.calls, "prepare_data")

    def setup(self, stage=None):
        self.calls = (*self.calls, "setup")
        super().setup(stage)

    def teardown(self, stage):
        self.calls = (*self.calls, "teardown")


sizes = []


def of_loss():
    made = mixture()
    sgd = partial(torch.optim.SGD, lr=0.1)
    return InItsLoss(made.global_expert, made.local_expert, optimizer=sgd).double()


CASES = {
    "a callback": (mixture, [Noting()]),
    "a mixture's loss": (of_loss, None),
    "a training step": (InItsStep, None),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("in_workers", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_the_trainer_of_a_client_has_the_federation_s_data_module(tmp_path, case, in_workers):
    make, callbacks = CASES[case]
    backend = TwoInThisProcess(AutoBackend()) if in_workers else AutoBackend()
    trainer = {"max_epochs": 2, "accelerator": "cpu", "callbacks": callbacks}
    phases = [Phase("it", FedAvg(), rounds=2, evaluate=False)]
    model, sizes[:] = make(), []
    data = two_quadratics() if isinstance(model, OneWeight) else blobs()
    federation(tmp_path, phases, trainer=trainer, backend=backend).fit(model, data)
    assert len(sizes) >= 4 and {*sizes} == {len(data.y)}


@pytest.mark.parametrize("callbacks", [None, [EveryBatch()]])
def test_no_client_s_trainer_calls_the_hooks_of_the_data_module(tmp_path, callbacks):
    given = blobs().arrays
    data = SetUpOnce(given.x_train, given.y_train, torch.arange(32).split([13, 8, 11]), dtype=torch.float64)
    trainer = {"max_epochs": 1, "accelerator": "cpu", "callbacks": callbacks}
    federation(tmp_path, [Phase("it", FedAvg(), rounds=2, evaluate=False)], trainer=trainer).fit(mixture(), data)
    assert data.calls == ("prepare_data", "setup")
