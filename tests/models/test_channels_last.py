"""Mixtures in channels-last memory format compute what they compute in contiguous format."""

import copy

import pytest
import torch
from helpers import assert_same_bits
from helpers.models import in_channels_last
from torch import nn

from fedmoe_pl import models

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
