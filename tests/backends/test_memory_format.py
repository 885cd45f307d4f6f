"""Channels-last format: mixtures and runs have the contiguous results, and it is kept in every backend and beyond."""

import copy
from functools import partial

import pytest
import torch
from helpers import TensorData, assert_same_bits
from helpers.backends import local_training, train
from helpers.ingredients import Own
from helpers.models import in_channels_last
from helpers.runs import Kill, assert_same
from helpers.runs import federation as made
from helpers.workers import TwoInThisProcess
from torch import nn
from torch.nn.parameter import is_lazy

from fedmoe_pl import PersonalizedMoE, Phase, models
from fedmoe_pl.algorithms import FedAvg, FineTuning, PFLMoE
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.backends.optimizers import optimizer_state, set_optimizer
from fedmoe_pl.backends.stacked import stacked_backend
from fedmoe_pl.backends.stacked.stack import Stack
from fedmoe_pl.backends.workers.pickling import dumps, loads
from fedmoe_pl.models import GlobalOnly, LinearGate, LocalOnly, NetworkGate, TwoConvCNN
from fedmoe_pl.rounds.begin import sized


class Watched(PersonalizedMoE):
    """Computes only in the format that it was asked for, in training and in evaluation."""

    is_checked = False

    def check_gate(self, x):
        self.is_checked = True  # the parts are tried before their format is set
        super().check_gate(x)
        self.is_checked = False

    def mix(self, x):
        assert self.is_checked or any(map(is_lazy, self.parameters())) or in_channels_last(self) == self.channels_last
        return super().mix(x)


def network(num_classes=3, dropout=0.0):
    return TwoConvCNN(1, num_classes, 16, dropout, 4, 4, 8, 8)


def model(channels_last=True, kind=PersonalizedMoE, fused=False, dropout=0.0, gated=False):
    torch.manual_seed(0)
    optimizer = partial(torch.optim.SGD, lr=0.05, momentum=0.9, fused=fused)
    gate = LinearGate(256) if gated else None
    return kind(network(dropout=dropout), gate=gate, optimizer=optimizer, channels_last=channels_last).double()


def phases():
    torch.manual_seed(1)
    return [
        Phase("FedAvg", FedAvg("global_expert.*"), rounds=3, clients_per_round=2, gate=GlobalOnly()),
        Phase("PFL-FB", FineTuning("local_expert.classifier.*", gate_fraction=0.25), gate=LocalOnly()),
        Phase("own gate", PFLMoE(), gate=NetworkGate(network(num_classes=1))),
    ]


def federation(path, of_phases=None, **kwargs):
    trainer = {"accelerator": "cpu", "max_epochs": 2, "devices": 1}
    return made(path, of_phases or phases(), trainer=trainer, **{"backend": TrainerBackend(), **kwargs})


def data():
    generator = torch.Generator().manual_seed(0)
    y = torch.arange(44) % 3
    x = (torch.randn(3, 1, 16, 16, generator=generator))[y] + torch.randn(44, 1, 16, 16, generator=generator)
    parts = torch.arange(32).split([10, 9, 13])
    return TensorData(x[:32], y[:32], parts, (x[32:], y[32:]), torch.float64, batch_size=4)


@pytest.fixture
def images():
    datamodule = data()
    datamodule.setup()
    return datamodule


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    run = federation(tmp_path_factory.mktemp("whole"))
    run.fit(model(kind=Watched, dropout=0.2), data())
    return run.run.states


@pytest.mark.slow
@pytest.mark.parametrize("way", ["contiguous", "workers", "killed"])
def test_a_run_has_the_results_of_contiguous_format_and_in_workers_and_after_a_kill_the_same_bits(whole, way, tmp_path):
    if way == "killed":
        with pytest.raises(KeyboardInterrupt):
            federation(tmp_path, callbacks=[Kill("on_client_end", 8)]).fit(model(kind=Watched, dropout=0.2), data())
    other = federation(tmp_path, backend=TwoInThisProcess() if way == "workers" else TrainerBackend())
    start = model(way != "contiguous", Watched, dropout=0.2)
    other.fit(start, data(), ckpt_path="last" if way == "killed" else None)
    for name, expected in whole.items():
        state = other.run.states[name]
        trees = [(dict(each.server), {c: dict(tree) for c, tree in each.clients.items()}) for each in (state, expected)]
        torch.testing.assert_close(*trees, **({"rtol": 1e-8, "atol": 1e-10} if way == "contiguous" else EQUAL))


EQUAL = {"rtol": 0, "atol": 0}


def test_a_resumed_phase_has_the_format_of_one_that_was_not_stopped(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        federation(tmp_path / "stopped", phases()[:1], callbacks=[Kill("on_round_end", 2)]).fit(model(), data())
    resumed, whole = (federation(tmp_path / name, phases()[:1]) for name in ("stopped", "whole"))
    resumed.fit(model(), data(), ckpt_path="last")
    whole.fit(model(), data())
    formats = [
        {name: tensor.stride() for tree in (state.initial, state.server) for name, tensor in tree.items()}
        for state in (resumed.run.states["FedAvg"], whole.run.states["FedAvg"])
    ]
    assert formats[0] == formats[1]


@pytest.mark.parametrize(
    "shape", [(6, 3, 5, 5), (6, 1, 5, 5), (6, 3, 1, 1), (6, 1, 1, 1), (1, 1, 4, 4), (6, 3, 2, 5, 5), (6, 3, 1, 1, 1)]
)
def test_tensors_and_modules_travel_in_their_format(shape):
    out_channels, in_channels, *kernel = shape
    kind, of = (nn.Conv3d, torch.channels_last_3d) if len(kernel) == 3 else (nn.Conv2d, torch.channels_last)
    module = kind(in_channels, out_channels, tuple(kernel))
    weights = [module.weight.detach(), copy.deepcopy(module).to(memory_format=of).weight.detach()]
    received = loads(dumps(weights))
    assert_same(received, weights)
    assert [weight.stride() for weight in received] == [weight.stride() for weight in weights]
    assert loads(dumps(module.to(memory_format=of))).weight.stride() == weights[1].stride()


@pytest.mark.parametrize("fused", [False, True])
def test_stacked_clients_have_the_format_and_get_the_results_of_clients_alone(images, fused, monkeypatch):
    begun = []

    class Recorded(Stack):
        def __init__(self, *args):
            super().__init__(*args)
            begun.append((self, strides(self)))

    monkeypatch.setattr(stacked_backend, "make_stack", Recorded)
    update, _ = train(StackedBackend(), local_training(model(fused=fused, gated=True), FedAvg(), images))
    expected, _ = train(TrainerBackend(), local_training(model(False, gated=True), FedAvg(), images))
    torch.testing.assert_close(update.sent, expected.sent, rtol=1e-9, atol=1e-10)
    ((stack, before),) = begun
    weights = [tensor for tensor in stack.stacked.values() if tensor.dim() == 5]
    assert len(weights) == 4  # two convolutions of two experts
    assert all(client.is_contiguous(memory_format=torch.channels_last) for weight in weights for client in weight)
    assert strides(stack) == before, "after training"


def strides(stack):
    return {name: tensor.stride() for name, tensor in stack.stacked.items()}


@pytest.mark.parametrize("fused", [False, True])
def test_a_kept_momentum_of_the_other_format_is_continued(images, fused):
    """Such as after a run was resumed with the other format."""

    def step(module, optimizer):
        optimizer.zero_grad()
        module.loss((images.x[:5], images.y[:5]))[0].backward()
        optimizer.step()

    def steps(kept_from, then):
        module = model(kept_from, fused=fused, gated=True)
        optimizer = module.configure_optimizers()
        step(module, optimizer)
        continued = model(then, fused=fused, gated=True)
        continued.load_state_dict(module.state_dict())
        set_optimizer(continued, None, optimizer_state(module.named_parameters(), optimizer))
        step(continued, continued.configure_optimizers())
        return continued.state_dict()

    expected = steps(False, False)
    for kept_from, then in ((False, True), (True, False), (True, True)):
        torch.testing.assert_close(steps(kept_from, then), expected, rtol=1e-9, atol=1e-11)


class OwnModule(Own):
    """A user's own module, which asks for the format itself."""

    def __init__(self, memory_format=torch.channels_last):
        torch.manual_seed(0)
        super().__init__(network(), partial(torch.optim.SGD, lr=0.05))
        self.to(memory_format=memory_format)
        self.memory_format = memory_format

    def forward(self, x):
        assert in_channels_last(self) == (self.memory_format == torch.channels_last)
        return super().forward(x)


@pytest.mark.slow
def test_a_user_s_own_module_keeps_the_format_that_it_chose(tmp_path):
    federated = []
    for memory_format in (torch.channels_last, torch.contiguous_format):
        run = federation(tmp_path, [Phase("FedAvg", FedAvg(), rounds=2)])
        run.fit(OwnModule(memory_format).double(), data())
        federated.append(run.client_module("FedAvg", 0))
    torch.testing.assert_close(federated[0].state_dict(), federated[1].state_dict(), rtol=1e-8, atol=1e-10)
    assert in_channels_last(federated[0])


def test_a_gate_that_the_data_size_gets_the_format(images):
    gate = NetworkGate(nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(1)))
    of_no_shape = nn.Sequential(network())
    module = PersonalizedMoE(of_no_shape, gate=gate, channels_last=True).double()
    assert in_channels_last(sized(module, images, seed=0))


# Mixtures


CHANNELS_LAST = torch.channels_last


class NarrowVGG16(models.VGG16):
    """The layers of VGG-16 with few channels, the last one as small as in the whole network: one pixel."""

    _WIDTHS = (8, "M", 8, 8, "M", 8, "M", 8, "M", 512, "M")


def opt_out(**kwargs):
    return models.PersonalizedMoE(
        models.TwoConvCNN(1, 3, 16), gate=models.NetworkGate(models.TwoConvCNN(1, 1, 16)), **kwargs
    )


def clustered(**kwargs):
    gate = models.NetworkGate(models.GateCNN(1, 3, image_size=16))
    return models.ClusteredMoE(
        models.LEAFCNN(1, 3, 8, 4, 16, image_size=16), 2, gate=gate, mixing="probabilities", **kwargs
    )


def representation(**kwargs):
    return models.RepresentationMoE(
        models.CNN(5, 1, 3), [models.CNN(4, 1, 3)], gate=models.SwitchNormGate(1024, 8), **kwargs
    )


def sparse(**kwargs):
    return models.SparseMoE(models.ConvBlock(1, 8, 16), models.ConvExpert(8, 3, 6, 4, 16), **kwargs)


MIXTURES = {
    "LeNet5": (
        lambda **kwargs: models.PersonalizedMoE(models.LeNet5(1, 3), gate=models.LinearGate(), **kwargs),
        (1, 32, 32),
    ),
    "LeNet5 in colour": (
        lambda **kwargs: models.PersonalizedMoE(models.LeNet5(3, 3), gate=models.FeatureGate(), **kwargs),
        (3, 32, 32),
    ),
    "VGG16": (lambda **kwargs: models.PersonalizedMoE(NarrowVGG16(3, 3), **kwargs), (3, 32, 32)),
    "TwoConvCNN": (opt_out, (1, 16, 16)),
    "LEAFCNN": (clustered, (1, 16, 16)),
    "IFCACNN": (lambda **kwargs: models.ClusteredMoE(models.IFCACNN(1, 3), 1, **kwargs), (1, 32, 32)),
    "CNN": (representation, (1, 32, 32)),
    "ConvBlock": (sparse, (1, 16, 16)),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_outputs_loss_and_gradients_are_those_of_contiguous_format(name):
    make, shape = MIXTURES[name]
    torch.manual_seed(0)
    contiguous = make().double()
    torch.manual_seed(0)
    module = make(channels_last=True).double()
    assert_same_bits(module.state_dict(), contiguous.state_dict())

    batch = torch.randn(4, *shape, dtype=torch.float64), torch.arange(4) % 3
    pooled = []
    for part in module.modules():
        if isinstance(part, nn.MaxPool2d):
            part.register_forward_hook(lambda part, arguments, output: pooled.append(output))
    (scores, weights, loss), expected = (step(each, batch) for each in (module, contiguous))
    torch.testing.assert_close((scores, weights, loss), expected, rtol=1e-11, atol=1e-11)
    for (parameter_name, parameter), other in zip(module.named_parameters(), contiguous.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-9, atol=1e-11, msg=parameter_name)
    assert pooled and all(output.is_contiguous(memory_format=CHANNELS_LAST) for output in pooled)
    images = [output for output in pooled if output.shape[2] > 1]
    assert not any(output.is_contiguous() for output in images), "the convolutions computed in channels-last"


def step(module, batch):
    torch.manual_seed(1)  # dropout
    loss, metrics = module.loss(batch)
    loss.backward()
    return metrics["logits"].detach(), metrics["gate_weights"].detach(), loss.detach()


@pytest.mark.parametrize("make", [lambda **kwargs: MIXTURES["LeNet5"][0](**kwargs), opt_out, clustered, sparse])
def test_the_format_is_asked_for_and_survives_copies(make):
    assert not in_channels_last(make())
    module = make(channels_last=True)
    assert in_channels_last(module)
    assert in_channels_last(copy.deepcopy(module).double())
    module.load_state_dict(make().state_dict())
    assert in_channels_last(module)


def test_layers_without_a_size_get_the_format_when_they_are_sized():
    network = nn.Sequential(nn.LazyConv2d(4, 3), nn.Flatten(), nn.LazyLinear(1))
    assert in_channels_last(
        models.PersonalizedMoE(models.LeNet5(), gate=models.NetworkGate(network), channels_last=True)
    )


def test_a_volume_stays_as_it_is():
    expert = nn.Sequential(nn.Conv3d(2, 2, 2), nn.Flatten(), nn.Linear(2, 3))
    module = models.PersonalizedMoE(expert, gate=models.EqualWeights(), channels_last=True)
    assert module(torch.zeros(1, 2, 2, 2, 2)).shape == (1, 3)
    assert module.global_expert[0].weight.is_contiguous()
