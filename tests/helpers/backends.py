"""Trains the clients of one phase with a backend, and compares two backends."""

from functools import partial
from types import SimpleNamespace

import torch
from torch import nn

from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends import LEAN_TRAINER, LocalTraining, Plan, StackedBackend, TrainerBackend
from fedmoe_pl.backends.backend import fold
from fedmoe_pl.deployment.audit import DryPlan
from fedmoe_pl.models import PersonalizedMoE
from helpers import Expert, TensorData

# From 3 to 100 samples, in batches of 10: less than a batch, whole batches, and a last batch of one sample.
UNEQUAL = (3, 100, 37, 11, 40, 41, 39, 10)
FEW = (3, 25, 11, 20)


class WithBatchNorm(Expert):
    def __init__(self):
        super().__init__()
        self.extractor = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Tanh())


class TwoGroups(PersonalizedMoE):
    """Two parameter groups with learning rates, momenta and decays of their own, and a schedule."""

    def configure_optimizers(self):
        groups = [
            {"params": [*self.global_expert.parameters()], "lr": 0.1, "momentum": 0.9},
            {"params": [*self.local_expert.parameters(), *self.gate.parameters()], "weight_decay": 0.1},
        ]
        optimizer = torch.optim.SGD(groups, lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)}


def images(augmentation=()) -> TensorData:
    """Two clients with 7 and 5 random images."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 1, 32, 32, generator=generator)
    y = torch.randint(10, (12,), generator=generator)
    parts = torch.arange(12).split([7, 5])
    data = TensorData(x, y, parts, dtype=torch.float64, batch_size=3, augmentation=augmentation)
    data.setup()
    return data


def exchanged(algorithm, server, kept, round) -> dict:
    """What each client keeps after an exchange, and what it received from other clients, by client."""
    plan = DryPlan(SimpleNamespace(algorithm=algorithm))
    return {client: (own, received) for client, own, _, received in plan.exchange(server, kept, (), round)}


def local_training(module, algorithm, datamodule, max_epochs=2, rounds=1, **trainer) -> LocalTraining:
    return LocalTraining(
        module=module,
        initial={name: tensor.detach().clone() for name, tensor in module.state_dict().items()},
        algorithm=algorithm,
        datamodule=datamodule,
        trainer={**LEAN_TRAINER, "max_epochs": max_epochs, "accelerator": "cpu", **trainer},
        batch_size=None,
        seed=0,
        participants=range(datamodule.num_clients),
        rounds=rounds,
    )


def begin(backend, training: LocalTraining) -> Plan:
    """The backend's plan of the phase, which begins with the tensors that it was planned with."""
    return backend.plan(training).begin(training)


def train(backend, training: LocalTraining, round=0) -> tuple[Update, dict]:
    """The folded update of all clients, and what each keeps."""
    return train_clients(begin(backend, training), round)


def train_clients(plan: Plan, round=0) -> tuple[Update, dict]:
    """The same with a plan that has begun, and may have trained other rounds."""
    training = plan.training
    server = training.algorithm.server_init(training.module)
    groups = list(plan.train(server, plan.groups(range(training.datamodule.num_clients)), {}, round))
    kept = {client: tree for group in groups for client, tree in group.clients.items()}
    return fold(training.algorithm, [group.update for group in groups if group.update is not None]), kept


def assert_agree(training: LocalTraining, tolerance: float, clients_per_stack=None, round=0):
    """The backends agree to the tolerance, and something was trained."""
    update, kept = train(TrainerBackend(), training, round)
    stacked_update, stacked_kept = train(StackedBackend(clients_per_stack), training, round)
    close = partial(torch.testing.assert_close, rtol=tolerance, atol=tolerance)
    close(stacked_update.sent, update.sent)
    assert stacked_update.weight == update.weight
    assert stacked_kept.keys() == kept.keys()
    for client in kept:
        close(stacked_kept[client], kept[client])
    trees = [update.sent, *kept.values()]
    parameters = [(tree, name) for tree in trees for name in tree if name in training.initial]
    moved = [(tree[name] - training.initial[name]).abs().max() for tree, name in parameters]
    assert max(moved) > 1e-3
