"""Channels-last format in every backend: it is kept, and the results are those of contiguous format."""

import copy
from functools import partial

import pytest
import torch
from helpers import TensorData
from helpers.backends import local_training, train
from helpers.models import in_channels_last
from helpers.runs import assert_same
from helpers.workers import TwoInThisProcess
from torch import nn

from fedmoe_pl.algorithms import FedAvg, FineTuning, Local
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.backends.optimizers import optimizer_state, set_optimizer
from fedmoe_pl.backends.stacked import stacked_backend
from fedmoe_pl.backends.stacked.stack import Stack
from fedmoe_pl.backends.workers.pickling import dumps, loads
from fedmoe_pl.models import GlobalOnly, LinearGate, LocalOnly, PersonalizedMoE, TwoConvCNN

MOMENTUM = {"lr": 0.1, "momentum": 0.9}


@pytest.fixture
def images():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 1, 16, 16, generator=generator)
    data = TensorData(x, torch.arange(30) % 3, torch.arange(30).split([9, 4, 10, 7]), dtype=torch.float64, batch_size=4)
    data.setup()
    return data


class Watched(PersonalizedMoE):
    """Computes a loss only in the format that it was asked for."""

    def loss(self, batch):
        assert in_channels_last(self) == self.channels_last
        return super().loss(batch)


def model(channels_last=True, gate=None, fused=False, kind=PersonalizedMoE):
    torch.manual_seed(0)
    expert = TwoConvCNN(1, 3, 16, 0.0, 4, 4, 8, 8)
    optimizer = partial(torch.optim.SGD, fused=fused, **MOMENTUM)
    gate = gate or LinearGate(256)
    return kind(expert, gate=gate, optimizer=optimizer, channels_last=channels_last).double()


@pytest.mark.parametrize("shape", [(6, 3, 5, 5), (6, 1, 5, 5), (6, 3, 1, 1), (6, 1, 1, 1), (1, 1, 4, 4)])
def test_tensors_and_modules_travel_in_their_format(shape):
    out_channels, in_channels, *kernel = shape
    module = nn.Conv2d(in_channels, out_channels, tuple(kernel))
    weights = [module.weight.detach(), copy.deepcopy(module).to(memory_format=torch.channels_last).weight.detach()]
    received = loads(dumps(weights))
    assert_same(received, weights)
    assert [weight.stride() for weight in received] == [weight.stride() for weight in weights]
    assert in_channels_last(loads(dumps(module.to(memory_format=torch.channels_last))))


ALGORITHMS = {
    "FedAvg": (FedAvg("global_expert.*"), GlobalOnly()),
    "Local": (Local(), None),
    "PFL-FB": (FineTuning("local_expert.classifier.*"), LocalOnly()),
}


@pytest.mark.few("FedAvg")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_training_gives_the_results_of_contiguous_format_and_workers_the_same_bits(images, name):
    algorithm, gate = ALGORITHMS[name]
    training = local_training(model(gate=gate, kind=Watched), algorithm, images, rounds=2)
    update, kept = result = train(TrainerBackend(), training)
    expected, expected_kept = train(
        TrainerBackend(), local_training(model(False, gate, kind=Watched), algorithm, images, rounds=2)
    )
    close = partial(torch.testing.assert_close, rtol=1e-9, atol=1e-11)
    close(update.sent, expected.sent)
    close(kept, expected_kept)
    assert_same([*train(TwoInThisProcess(), training)], [*result])


@pytest.mark.parametrize("fused", [False, True])
def test_stacked_clients_get_the_results_of_clients_alone(images, fused):
    training = local_training(model(fused=fused), FedAvg(), images)
    update, _ = train(StackedBackend(), training)
    expected, _ = train(TrainerBackend(), local_training(model(False), FedAvg(), images))
    torch.testing.assert_close(update.sent, expected.sent, rtol=1e-9, atol=1e-10)


def test_a_stack_has_the_format_of_its_clients_before_and_after_training(images, monkeypatch):
    begun = []

    class Recorded(Stack):
        def __init__(self, *args):
            super().__init__(*args)
            begun.append((self, strides(self)))

    monkeypatch.setattr(stacked_backend, "make_stack", Recorded)
    train(StackedBackend(), local_training(model(), FedAvg(), images))
    ((stack, before),) = begun
    weights = [tensor for tensor in stack.stacked.values() if tensor.dim() == 5]
    assert len(weights) == 4  # two convolutions of two experts
    assert all(client.is_contiguous(memory_format=torch.channels_last) for weight in weights for client in weight)
    assert strides(stack) == before


def strides(stack):
    return {name: tensor.stride() for name, tensor in stack.stacked.items()}


@pytest.mark.parametrize("fused", [False, True])
def test_a_kept_momentum_of_the_other_format_is_continued(images, fused):
    """Such as after a run was resumed with the other format."""

    def steps(kept_from, then):
        module = model(kept_from, fused=fused)
        optimizer = module.configure_optimizers()
        step(module, optimizer, images)
        continued = model(then, fused=fused)
        continued.load_state_dict(module.state_dict())
        set_optimizer(continued, None, optimizer_state(module.named_parameters(), optimizer))
        step(continued, continued.configure_optimizers(), images)
        return continued.state_dict()

    expected = steps(False, False)
    for kept_from, then in ((False, True), (True, False), (True, True)):
        torch.testing.assert_close(steps(kept_from, then), expected, rtol=1e-9, atol=1e-11)


def step(module, optimizer, images):
    optimizer.zero_grad()
    module.loss((images.x[:5], images.y[:5]))[0].backward()
    optimizer.step()
