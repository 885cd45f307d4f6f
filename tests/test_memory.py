"""Two names of a module share memory only if the module ties them, however their tensors have arrived."""

import itertools
import pickle

import pytest
import torch
from helpers import Expert, assert_same_bits, blobs, momentum_sgd
from helpers.runs import assert_same, federation
from torch import nn

from fedmoe_pl import PersonalizedMoE, Phase
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import TrainerBackend, trainer
from fedmoe_pl.backends.untrained import DeviceCopies, ModuleCopies
from fedmoe_pl.backends.workers.pickling import SharedObject
from fedmoe_pl.models import EqualWeights, LocalOnly
from fedmoe_pl.trees import borrow, copy_module, load_tree


class Two(nn.Module):
    """Two layers of the same values, and a third that is tied to the first."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(3, 3, bias=False) for _ in "abc")
        self.b.weight.data.copy_(self.a.weight.data)
        self.c.weight = self.a.weight


def one_tensor():
    module = Two().requires_grad_(False)
    module.b.weight.data = module.a.weight.data
    return module


def view():
    module = Two().requires_grad_(False)
    module.b.weight.data = module.a.weight.data.T
    return module


def borrowed():
    """Two layers that borrow the same tensor of another module."""
    module, other = Two(), nn.Linear(3, 3, bias=False)
    for name, parameter in module.named_parameters():
        assert name in ("a.weight", "b.weight")
        borrow(parameter, other.weight.data)
    return module


def of_a_checkpoint():
    """The phase's tensors as a checkpoint gives them back: equal ones are one tensor."""
    module = Two()
    initial = dict.fromkeys(module.state_dict(), module.a.weight.detach().clone())
    return ModuleCopies(module, initial, {"a.weight", "b.weight"}, DeviceCopies()).module


MADE = [Two, one_tensor, view, borrowed, of_a_checkpoint]


def in_worker(module):
    """As a worker gets it; it is pickled, because the worker maps the file anew."""
    shared = SharedObject(module)  # whose end would delete the file
    return pickle.loads(pickle.dumps(shared)).load()


WAYS = {
    "copy": copy_module,
    "copy of a copy": lambda module: copy_module(copy_module(module)),
    "copy in a worker": lambda module: copy_module(in_worker(module)),
    "copy of what a worker gets of a copy": lambda module: copy_module(in_worker(copy_module(module))),
}


def step(module, tensors):
    """Changes some parameters by 1, as an optimizer does."""
    with torch.no_grad():
        for name in tensors:
            module.get_parameter(name).add_(1)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", MADE)
def test_writing_to_a_parameter_of_a_copy_changes_those_that_are_tied_to_it_and_no_other(make, way):
    module = make()
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    for names, write in itertools.product((["a.weight", "c.weight"], ["b.weight"]), (load_tree, step)):
        copied = WAYS[way](module)
        assert copied.a.weight is copied.c.weight and copied.a.weight is not copied.b.weight
        assert_same_bits(copied.state_dict(), before)
        changed = {names[0]: before[names[0]] + 1}
        write(copied, changed)
        assert_same_bits(copied.state_dict(), {**before, **dict.fromkeys(names, changed[names[0]])})
        assert_same_bits(module.state_dict(), before)


@pytest.mark.slow
def test_an_expert_that_was_frozen_in_an_earlier_run_is_trained_in_workers_as_any_other(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "_SAMPLES_PER_TRAINER", 0)

    def fitted(path, model, devices):
        settings = {"accelerator": "cpu", "max_epochs": 1, "devices": devices}
        run = federation(tmp_path / path, [Phase("it", FedAvg())], trainer=settings, backend=TrainerBackend())
        run.fit(model, blobs())
        return run.run.states["it"]

    def expert():
        torch.manual_seed(0)
        return Expert().double()

    used = expert()
    frozen = PersonalizedMoE(used.requires_grad_(False), expert(), gate=LocalOnly(), optimizer=momentum_sgd)
    fitted("earlier", frozen, 1)
    expected, found = (
        fitted(f"{devices}", PersonalizedMoE(each, gate=EqualWeights(), optimizer=momentum_sgd), devices)
        for devices, each in ((1, expert()), (2, used.requires_grad_(True)))
    )
    assert_same_bits(found.server, expected.server)
    assert_same(found.evaluations, expected.evaluations)
