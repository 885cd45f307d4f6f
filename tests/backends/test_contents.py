"""What counts as a change of a module that the next client would find, and what does not."""

import logging
import random
from collections import deque
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import Expert, blobs, mixture
from helpers.backends import local_training, train
from torch import nn

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import TrainerBackend
from fedmoe_pl.backends.contents import Contents
from fedmoe_pl.backends.untrained import Untrained
from fedmoe_pl.models import LinearGate
from fedmoe_pl.trees import copy_module


class Slotted:
    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class Listed(list):
    """A list with an attribute, whose truth is not defined."""

    calls = 0

    def __bool__(self):
        raise ValueError


def count(calls, *arguments):
    calls[0] += 1


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.recurrent = nn.Linear(2, 2), nn.LSTM(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("graph", torch.eye(2).to_sparse(), persistent=False)
        self.calls, self.pair, self.weights, self.kept = 0, (1, [2]), [self.layer.weight], torch.zeros(2)
        self.queue, self.array, self.noted = deque([1]), np.zeros(2), {"calls": [0]}
        self.scalar, self.objects = np.array(0.0), np.array([[1], None], dtype=object)
        self.own, self.slotted, self.listed, self.set = SimpleNamespace(calls=0), Slotted(), Listed(), {1}
        self.generators = torch.Generator(), random.Random(0), np.random.default_rng(0), np.random.RandomState(0)
        self.bit_generator, self.raw = np.random.PCG64(0), bytearray(b"0")
        self.logger, self.note = logging.getLogger("of everything"), partial(count, [0])
        self.registered = self.listed.append

    def replace_weight(self):
        self.layer.weight.data = self.layer.weight.data.clone()

    def replace_buffer(self):
        self.mean = self.mean.clone()


CHANGES = {
    "'calls' of Everything": lambda it: setattr(it, "calls", 1),
    "'added' of Everything": lambda it: setattr(it, "added", 1),
    "'pair' of Everything": lambda it: it.pair[1].append(3),
    "'kept' of Everything": lambda it: it.kept.add_(1),
    "'queue' of Everything": lambda it: it.queue.append(1),
    "'array' of Everything": lambda it: it.array.put(0, 1),
    "'scalar' of Everything": lambda it: it.scalar.fill(1),
    "'objects' of Everything": lambda it: it.objects.put(1, 1),
    "'noted' of Everything": lambda it: it.noted["calls"].append(1),
    "'own' of Everything": lambda it: setattr(it.own, "calls", 1),
    "'slotted' of Everything": lambda it: setattr(it.slotted, "calls", 1),
    "'listed' of Everything": lambda it: setattr(it.listed, "calls", 1),
    "'set' of Everything": lambda it: it.set.add(2),
    "'bit_generator' of Everything": lambda it: it.bit_generator.random_raw(),
    "'raw' of Everything": lambda it: it.raw.append(1),
    "'note' of Everything": lambda it: it.note(),
    "'mean' of Everything": Everything.replace_buffer,
    "'weight' of Linear": Everything.replace_weight,
    "'hook' of Everything": lambda it: setattr(it, "hook", it.register_forward_hook(count)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_named(change):
    original = Everything()
    module = copy_module(original)
    contents = Contents(module, original)
    CHANGES[change](module)
    assert contents.change() in (change, "'_forward_hooks' of Everything")


@pytest.mark.parametrize("number", range(4))
def test_numbers_that_a_generator_has_drawn_are_a_change(number):
    original = Everything()
    module = copy_module(original)
    contents = Contents(module, original)
    generator = module.generators[number]
    assert not contents.change()
    _ = torch.rand(1, generator=generator) if number == 0 else generator.random()
    assert contents.change() == "'generators' of Everything"


def use(module):
    """Changes values of tensors, and what copies share."""
    with torch.no_grad():
        for tensor in (*module.parameters(), module.mean):
            tensor.add_(1)
    module.logger.debug("of one client")
    logging.getLogger("of nobody").debug("of all")
    module.eval()


def test_values_of_tensors_and_what_copies_share_are_none():
    original = Everything()
    module = copy_module(original)
    contents = Contents(module, original)
    use(module)
    assert not contents.change()


def test_a_move_is_none_but_an_attribute_is_where_the_module_moves():
    original = Everything()
    module = copy_module(original)
    contents = Contents(module, original, on_cpu=False)
    del module.graph  # its copies are none
    module.register_buffer("graph", torch.eye(2), persistent=False)
    module._apply(torch.clone)
    assert not contents.change()
    module.calls += 1
    assert contents.change() == "'calls' of Everything"


class Secretive:
    """Cannot be compared, and copies as itself."""

    __slots__ = ()

    @property
    def __dict__(self):
        raise RuntimeError


def test_what_cannot_be_looked_at_is_a_change():
    original = Everything()
    original.secretive = Secretive()
    module = copy_module(original)
    assert Contents(module, original).change() == "something that cannot be compared"


@pytest.fixture
def copies(monkeypatch):
    made = []
    copy = Untrained.copy
    monkeypatch.setattr(Untrained, "copy", lambda self: made.append(self) or copy(self))
    return made


class Recurrent(Expert):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(5, 5)

    def forward(self, x):
        return super().forward(self.recurrent(x)[0])


def test_clients_use_one_copy_of_a_recurrent_network(copies):
    train(TrainerBackend(), local_training(mixture(LinearGate(5), Recurrent()), FedAvg(), blobs((4, 4, 4))))
    assert len(copies) == 1


class Expanded(Expert):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((1,), 2.0).expand(5), persistent=False)

    def forward(self, x):
        return super().forward(x * self.scale)


def test_a_buffer_whose_elements_share_memory_needs_no_other_copy(copies):
    update, _ = train(TrainerBackend(), local_training(mixture(LinearGate(5), Expanded()), FedAvg(), blobs((4, 4, 4))))
    assert len(copies) == 1 and update.weight == 12
