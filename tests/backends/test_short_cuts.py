"""Models, losses and optimizers on which stacking or looking up would go wrong give what a plain Trainer gives."""

import random
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import EveryBatch, Expert, blobs, mixture, momentum_sgd, small_expert
from helpers.backends import begin, local_training, train, train_clients
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import AutoBackend, StackedBackend, TrainerBackend
from fedmoe_pl.backends.features import FeatureCache
from fedmoe_pl.backends.stacked import StackedPlan
from fedmoe_pl.backends.stacked.members import StackedData
from fedmoe_pl.models import ConstantGate, LinearGate, PersonalizedMoE, ProxyGate, SmallMLP, SparseMoE

FROZEN = FedAvg("local_expert.classifier.*", "local_expert.classifier.*")
PLAIN = partial(torch.optim.SGD, lr=0.1)


class Changed(Expert):
    """An expert of which one call of ``change`` makes the input of the extractor, and that of the classifier."""

    def __init__(self, before=lambda self, x: x, after=lambda self, z: z, layer=None, **attributes):
        super().__init__()
        self.before, self.after = before, after
        vars(self).update(attributes)
        self.layer = nn.Identity() if layer is None else layer

    def forward(self, x):
        z = self.extractor(self.layer(self.before(self, x)))
        return self.classifier(self.after(self, z))


def with_expert(*arguments, gate=None, **attributes):
    return lambda: mixture(gate or ConstantGate(0.5), Changed(*arguments, **attributes))


def first(layer):
    """Both experts with a layer of their own in front."""
    return lambda: mixture(ConstantGate(0.5), Changed(layer=layer()))


def close(actual, expected):
    torch.testing.assert_close(actual[0].sent, expected[0].sent, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(actual[1], expected[1], rtol=1e-9, atol=1e-10)


def seeded(make):
    torch.manual_seed(0)
    return make()


def assert_right_or_refused(make, algorithm, data, max_epochs=2, is_promised=True, **arguments) -> str:
    """``auto`` gives what a plain Trainer for each client gives; so does an explicit stack, or it is refused.

    Returns whether each stacks: "auto", "explicit", both or none.
    """

    def training(**callbacks):
        return local_training(seeded(make), algorithm, data, max_epochs, **arguments, **callbacks)

    expected = train(TrainerBackend(), training(callbacks=[EveryBatch()]))
    plan, stacks = begin(AutoBackend(), training()), ""
    if isinstance(plan, StackedPlan):
        close(train_clients(plan), expected)
        stacks = "auto "
    try:
        plan = begin(StackedBackend(), training())
    except MisconfigurationException:
        return stacks
    if is_promised:
        close(train_clients(plan), expected)
    return stacks + "explicit"


def padded(table, x):
    return F.embedding(x, table.weight, padding_idx=0)


def layers(*first):
    """Experts of PyTorch's layers, so that short batches may be padded."""
    return lambda: mixture(
        LinearGate(5), nn.Sequential(*(layer() for layer in first), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3))
    )


class Own(nn.Linear):
    """A layer of a user's own, of which one cannot know what it does with other samples."""


def balanced():
    embedding = nn.Sequential(nn.Linear(5, 6), nn.Sigmoid())
    return SparseMoE(embedding, small_expert(), 2, gate=ProxyGate(2, 6), optimizer=PLAIN, load_balancing=0.3).double()


def with_class_to_ignore():
    loss = nn.CrossEntropyLoss(ignore_index=1)
    return PersonalizedMoE(SmallMLP(5, num_classes=3), optimizer=PLAIN, loss=loss).double()


PADDED = {
    "torch's layers": (layers(), True),
    "layers that treat samples apart": (layers(lambda: nn.LayerNorm(5), lambda: nn.GroupNorm(1, 5), nn.Identity), True),
    "the package's layers": (lambda: mixture(LinearGate(5), SmallMLP(5, num_classes=3)), True),
    "a layer of the user's": (layers(lambda: Own(5, 5)), False),
    "batch normalization": (layers(lambda: nn.BatchNorm1d(5)), False),
    "a softmax over samples": (layers(lambda: nn.Softmax(dim=0)), False),
    "a balance of experts over the batch": (balanced, False),
    "a loss of another class to ignore": (with_class_to_ignore, False),
}


@pytest.mark.few("torch's layers")
@pytest.mark.parametrize("name", PADDED)
def test_short_batches_are_padded_only_where_samples_are_apart(name, monkeypatch):
    make, pads = PADDED[name]
    seen = []
    epoch = StackedData.epoch
    monkeypatch.setattr(StackedData, "epoch", lambda self, pads: seen.append(pads) or epoch(self, pads))
    assert assert_right_or_refused(make, FedAvg(), blobs((13, 8, 11))) == "auto explicit"
    assert {*seen} == {pads}


def noise(self, x):
    return x + torch.randn_like(x) if self.training else x


def mixed(self, x):
    return 0.5 * (x + x.flip(0)) if self.training else x


LOOKED_UP = {
    "dropout before": (with_expert(lambda self, x: F.dropout(x, 0.5, self.training), gate=ConstantGate(0)), False),
    "a layer of dropout before": (lambda: mixture(ConstantGate(0), Changed(layer=nn.Dropout(0.5))), False),
    "dropout in it, and after": (lambda: mixture(ConstantGate(0), Expert(dropout=0.5)), True),
    "noise before": (with_expert(noise, gate=ConstantGate(0)), False),
    "mixing before": (with_expert(mixed, gate=ConstantGate(0)), False),
    "dropout after": (with_expert(after=lambda self, z: F.dropout(z, 0.5, True), gate=ConstantGate(0)), True),
    "inputs that are changed in place": (
        with_expert(lambda self, x: x.sub_(0.5).div_(0.25), gate=ConstantGate(0)),
        False,
    ),
    "nothing": (lambda: mixture(ConstantGate(0)), True),
    **{
        f"a draw that seldom matters, of {name}": (
            with_expert(lambda self, x, draw=draw: x / 2 if draw() < 0.1 else x, gate=ConstantGate(0)),
            False,
        )
        for name, draw in (("PyTorch", lambda: torch.rand(())), ("NumPy", np.random.rand), ("Python", random.random))
    },
}


class Scaled(PersonalizedMoE):
    """Inputs that grow with the epoch."""

    def mix(self, x):
        try:
            return super().mix(x * (1 + self.trainer.current_epoch))
        except Exception:
            return super().mix(x)


def scaled():
    plain = mixture(ConstantGate(0))
    return Scaled(plain.global_expert, plain.local_expert, plain.gate, optimizer=momentum_sgd).double()


LOOKED_UP["inputs of an epoch"] = (scaled, False)


@pytest.mark.few("inputs of an epoch")
@pytest.mark.parametrize("name", LOOKED_UP)
def test_outputs_are_looked_up_only_where_steps_compute_them_from_samples(name, monkeypatch):
    make, looks_up = LOOKED_UP[name]
    data, found, find = blobs((13, 8, 11)), [], FeatureCache.find
    monkeypatch.setattr(FeatureCache, "find", lambda *arguments: found.append(find(*arguments)) or found[-1])
    expected = train(TrainerBackend(), local_training(make(), FROZEN, data, 3, callbacks=[EveryBatch()]))
    close(train(TrainerBackend(), local_training(make(), FROZEN, data, 3)), expected)
    assert {features is not None for features in found} == {looks_up}
    assert_right_or_refused(make, FROZEN, data, max_epochs=3)
