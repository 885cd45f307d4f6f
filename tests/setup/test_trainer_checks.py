"""Arguments of clients' Trainers: those with which no client can train are refused, and no others."""

import re
from datetime import timedelta

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.strategies import SingleDeviceStrategy

from fedmoe_pl.backends import LEAN_TRAINER
from fedmoe_pl.setup.check_trainer import check_trainer

TRAINERS = {
    "trainer.accelerator is gpuu, but must be one that Lightning accepts: ": {"accelerator": "gpuu"},
    "trainer.devices is 0, but must be one that Lightning accepts: `devices` selected": {"devices": 0},
    "trainer.devices is 1000000000, but must be at most ": {"devices": 10**9},
    "trainer.max_epochs is nan, but must be the number of local epochs, at least 0 and": {"max_epochs": float("nan")},
    "trainer.max_epochs is None, but must be the number of local epochs, at least 0 and": {"max_epochs": None},
    "trainer.max_epochs is 1000000001, but must be the number of local epochs, at least 0 and at most 1,000,000,000.": {
        "max_epochs": 10**9 + 1
    },
    "trainer.max_steps is 0, but must be at least 1, or -1 for no limit.": {"max_steps": 0},
    "trainer.max_time is 00:00:00:00, but must be above 0.": {"max_time": "00:00:00:00"},
    "trainer.callbacks has a Timer whose duration is 0, but must be above 0.": {"callbacks": Timer(timedelta(0))},
    "trainer.strategy is SingleDeviceStrategy, but must be auto, because this one trains on meta, not on cpu.": {
        "strategy": SingleDeviceStrategy("meta")
    },
    "trainer.callbacks is ModelCheckpoint, but must be one that Lightning accepts: ": {
        "enable_checkpointing": False,
        "callbacks": [ModelCheckpoint()],
    },
    "trainer.max_time is x, but must be one that Lightning accepts": {"max_time": "x"},
    "trainer.accumulate_grad_batches is 0, but must be at least 1": {"accumulate_grad_batches": 0},
    "trainer.accumulate_grad_batches is 9223372036854775808, but must be": {"accumulate_grad_batches": 2**63},
    "trainer.gradient_clip_val is -1, but must be a finite number of at least 0.": {"gradient_clip_val": -1},
    "trainer.gradient_clip_val is inf, but must be a finite number of at least 0.": {"gradient_clip_val": float("inf")},
    "trainer.limit_train_batches is 0, but must be a number of batches of at least 1, or": {"limit_train_batches": 0},
    "trainer.limit_train_batches is 0.0, but must be a number of batches": {"limit_train_batches": 0.0},
    "trainer.limit_val_batches is 1.5, but must be a number of batches": {"limit_val_batches": 1.5},
    "trainer.strategy is ddp, but must be auto, because a client trains on one device.": {"strategy": "ddp"},
    "trainer.check_val_every_n_epoch is 0, but must be at least 1.": {"check_val_every_n_epoch": 0},
    "trainer.max_epoch is not an argument of Trainer; did you mean max_epochs?": {"max_epoch": 3},
    "trainer.num_nodes is 1000000000, but must be 1: a client trains on one device;": {"num_nodes": 10**9},
    "trainer.num_nodes is 2, but must be 1": {"accelerator": "cpu", "num_nodes": 2},
    "trainer.precision is 'bf16-true', but must be": {"accelerator": "cpu", "precision": "bf16-true"},
}


@pytest.mark.parametrize("sentence", TRAINERS)
def test_a_trainer_that_no_client_can_have_is_refused(sentence):
    with pytest.raises(MisconfigurationException, match=re.escape(sentence)):
        check_trainer({**LEAN_TRAINER, "accelerator": "cpu", "max_epochs": 1, **TRAINERS[sentence]})


@pytest.mark.parametrize(
    "arguments",
    [
        {"callbacks": Timer()},
        {"callbacks": [Timer(timedelta(hours=1))]},
        {"strategy": "single_device"},
        {"strategy": SingleDeviceStrategy("cpu")},
    ],
    ids=["a callback", "a list of callbacks", "the name of a strategy", "a strategy"],  # the same in all workers
)
def test_a_trainer_that_a_client_can_have_is_not_refused(arguments):
    for _ in range(2):  # the first check leaves the arguments as they are
        check_trainer({**LEAN_TRAINER, "accelerator": "cpu", **arguments})
