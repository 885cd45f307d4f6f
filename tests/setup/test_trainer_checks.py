"""Arguments of clients' Trainers: those with which no client can train are refused, and no others."""

from datetime import timedelta

import pytest
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.strategies import SingleDeviceStrategy

from fedmoe_pl.backends import LEAN_TRAINER
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.setup.check_trainer import check_trainer

TRAINERS = [
    ("accelerator", {"accelerator": "gpuu"}),
    ("devices", {"devices": 0}),
    ("devices", {"devices": 10**9}),
    ("max_epochs", {"max_epochs": None}),
    ("max_epochs", {"max_epochs": 10**9 + 1}),
    ("max_steps", {"max_steps": 0}),
    ("max_time", {"max_time": "00:00:00:00"}),
    ("max_time", {"max_time": "x"}),
    ("callbacks", {"callbacks": Timer(timedelta(0))}),
    ("callbacks", {"enable_checkpointing": False, "callbacks": [ModelCheckpoint()]}),
    ("strategy", {"strategy": SingleDeviceStrategy("meta")}),
    ("strategy", {"strategy": "ddp"}),
    ("accumulate_grad_batches", {"accumulate_grad_batches": 0}),
    ("gradient_clip_val", {"gradient_clip_val": -1}),
    ("limit_train_batches", {"limit_train_batches": 0.0}),
    ("limit_val_batches", {"limit_val_batches": 1.5}),
    ("check_val_every_n_epoch", {"check_val_every_n_epoch": 0}),
    ("max_epoch", {"max_epoch": 3}),
    ("num_nodes", {"num_nodes": 2}),
    ("precision", {"precision": "bf16-true"}),
]


@pytest.mark.parametrize(("argument", "arguments"), TRAINERS)
def test_a_trainer_that_no_client_can_have_is_refused(argument, arguments):
    with pytest.raises(InvalidArgumentError) as error:
        check_trainer({**LEAN_TRAINER, "accelerator": "cpu", "max_epochs": 1, **arguments})
    assert error.value.argument == f"trainer.{argument}"


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
