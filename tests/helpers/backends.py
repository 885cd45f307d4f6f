"""Trains the clients of one phase with a backend, and compares two backends."""

import array
import itertools
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn

from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends import LEAN_TRAINER, LocalTraining, Plan, StackedBackend, TrainerBackend
from fedmoe_pl.backends.backend import fold
from fedmoe_pl.deployment.audit import DryPlan
from fedmoe_pl.models import PersonalizedMoE
from helpers import Expert

# From 3 to 100 samples, in batches of 10: less than a batch, whole batches, and a last batch of one sample.
UNEQUAL = (3, 100, 37, 11, 40, 41, 39, 10)
FEW = (3, 25, 11, 20)


class Keeping(Expert):
    """Changes more than the values of tensors when it is trained."""

    def __init__(self, what):
        super().__init__()
        self.what, self.calls, self.seen = what, 0, []
        self.last, self.counted, self.noted = deque(maxlen=3), np.zeros(1), {"calls": [0]}
        self.own, self.total, self.generator = SimpleNamespace(calls=0), torch.zeros(2), torch.Generator()
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("scale", torch.ones(6), persistent=False)
        self.counter, self.of_c = itertools.count(), array.array("q", [0])
        self.mean.seen = next(self.classifier.parameters()).seen = 0

    def forward(self, x):
        features = self.extractor(x)
        if self.training:
            if self.what == "a buffer":
                self.mean = 0.9 * self.mean + 0.1 * features.mean(0).detach()
            elif self.what == "a buffer that is not saved":
                self.scale = self.scale * 0.9
            elif self.what == "an attribute":
                self.calls += 1
            elif self.what == "a list":
                self.seen.append(len(x))
            elif self.what == "a queue":
                self.last.append(len(x))
            elif self.what == "an array":
                self.counted += 1
            elif self.what == "a list in a dict":
                self.noted["calls"][0] += 1
            elif self.what == "an object":
                self.own.calls += 1
            elif self.what == "a tensor that is no buffer":
                self.total += 1
            elif self.what == "a counter":
                features = features + 0.01 * next(self.counter)
            elif self.what == "an array of C":
                self.of_c[0] += 1
                features = features + 0.01 * self.of_c[0]
            elif self.what.startswith("an attribute of a"):
                of = self.mean if self.what.endswith("buffer") else next(self.classifier.parameters())
                of.seen = getattr(of, "seen", 0) + 1  # deepcopy drops it
                features = features + 0.01 * of.seen
            elif self.what == "a generator":
                features = features * torch.rand(1, generator=self.generator).to(features)
            else:
                weight = next(self.classifier.parameters())
                weight.data = weight.data.clamp(-0.1, 0.1)
        number = self.calls + len(self.seen) + len(self.last) + self.counted[0] + self.noted["calls"][0]
        return self.classifier((features - self.mean) * self.scale * 0.9 ** (number + self.own.calls + self.total[0]))


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
    groups = list(plan.train(server, range(training.datamodule.num_clients), {}, round))
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
