"""The papers' networks: sizes, and layers against definitions written out again."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from helpers.models import count
from torch import nn

from fedmoe_pl import Federation, Phase, models
from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import Digits


def test_vgg16_has_the_papers_number_of_parameters_and_initial_convolutions():
    expert = models.VGG16()
    assert count(expert) == 15_245_130
    assert count(expert.extractor) == 14_714_688
    convolutions = [layer for layer in expert.extractor if isinstance(layer, nn.Conv2d)]
    assert len(convolutions) == 13
    for convolution in convolutions:
        expected = math.sqrt(2 / (9 * convolution.out_channels))
        standard_error = expected / math.sqrt(2 * convolution.weight.numel())
        assert abs(convolution.weight.std().item() - expected) < 5 * standard_error
        assert not convolution.bias.any()
    assert [layer.p for layer in expert.classifier if isinstance(layer, nn.Dropout)] == [0.5, 0.5]
    assert expert.extractor(torch.zeros(1, 3, 32, 32)).shape == (1, 512)


SIZES = [
    (models.LeNet5(), 61_706, 400),
    (models.LeNet5(3), 62_006, 400),
    (models.SmallMLP(64, 20, 7), 1300 + 420 + 147, 20),
    (models.CNN(1), 2_621_558, 500),
    (models.CNN(2), 1_815_142, 500),
    (models.CNN(3), 1_320_558, 500),
    (models.CNN(4), 1_060_358, 500),
    (models.CNN(5), 670_058, 500),
    (models.LEAFCNN(), 942_634, 800),
    (models.LEAFCNN(3, 10, 32, 256, 256, 0.76), 1_848_714, 6400),
    # 1 * 25 * 32 + 32, 32 * 25 * 64 + 64, (64 * 16) * 2048 + 2048, 2048 * 62 + 62
    (models.LEAFCNN(1, 62, 32, 64, 2048, image_size=28), 832 + 51_264 + 2_099_200 + 127_038, 1024),
    (models.IFCACNN(), 798_752, 1600),
    (models.TwoConvCNN(), 62_006, 400),
    (models.TwoConvCNN(1, 10, 28), 44_426, 256),
    (models.TwoConvCNN(1, 10, 28, 0.5, 6, 12, 84, 42), 22_180, 192),
    (models.FedAvgCNN(), 878_538, 1600),
    (models.FedAvgCNN(1, 10, 28), 582_026, 1024),
]


@pytest.mark.parametrize(("expert", "parameters", "features"), SIZES, ids=lambda value: type(value).__name__)
def test_an_expert_has_the_papers_number_of_parameters_and_is_its_classifier_on_its_extractor(
    expert, parameters, features
):
    expert = copy.deepcopy(expert).eval()
    x = torch.randn(2, *expert.input_shape)
    assert count(expert) == parameters
    assert expert.extractor(x).shape == (2, features)
    assert expert(x).shape == (2, expert.num_classes)
    assert torch.equal(expert(x), expert.classifier(expert.extractor(x)))


def test_bilstm_has_the_papers_number_of_parameters_and_reads_texts_of_any_length():
    expert = models.BiLSTM()
    assert count(expert) == 1_085_708
    assert expert.input_dtype == torch.int64
    for shape in ((3, 7), (2, *expert.input_shape)):
        x = torch.randint(10_002, shape, dtype=expert.input_dtype)
        assert expert.extractor(x).shape == (len(x), 128)
        assert torch.equal(expert(x), expert.classifier(expert.extractor(x)))
        assert expert(x).shape == (len(x), 4)


def conv(p, name, x):
    return F.conv2d(x, p[f"{name}.weight"], p[f"{name}.bias"])


def fc(p, name, x):
    return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


def pool_relu(x):
    return F.max_pool2d(F.relu(x), 2)


def two_convolutions(p, x):
    return pool_relu(conv(p, "extractor.3", pool_relu(conv(p, "extractor.0", x)))).flatten(1)


def pfedmoe(p, x):
    x = F.relu(fc(p, "extractor.7", two_convolutions(p, x)))
    return fc(p, "classifier", F.relu(fc(p, "extractor.9", x)))


def leaf(p, x):
    return fc(p, "classifier.3", F.dropout(F.relu(fc(p, "classifier.0", two_convolutions(p, x))), 0.8))


def ifca(p, x):
    x = lrn(pool_relu(conv(p, "extractor.0", x)))
    return dropped(p, F.max_pool2d(lrn(F.relu(conv(p, "extractor.4", x))), 2).flatten(1))


def dropped(p, x):
    x = F.dropout(F.relu(fc(p, "classifier.0", x)), 0.5)
    return fc(p, "classifier.5", F.relu(fc(p, "classifier.3", x)))


def lrn(x):
    """A channel's window is itself, the two before it and the one after it."""
    squares = F.pad(x**2, (0, 0, 0, 0, 2, 1))
    window = sum(squares[:, i : i + x.shape[1]] for i in range(4))
    return x / (1 + 0.001 / 9 / 4 * window) ** 0.75


def lenet5(p, x):
    x = F.relu(fc(p, "classifier.0", two_convolutions(p, x)))
    return fc(p, "classifier.4", F.relu(fc(p, "classifier.2", x)))


def vgg16(p, x):
    index = 0
    for blocks in (2, 2, 3, 3, 3):
        for _ in range(blocks):
            x = F.relu(F.conv2d(x, p[f"extractor.{index}.weight"], p[f"extractor.{index}.bias"], padding=1))
            index += 2
        x = F.max_pool2d(x, 2)
        index += 1
    x = F.relu(fc(p, "classifier.1", F.dropout(x.flatten(1), 0.5)))
    return fc(p, "classifier.6", F.relu(fc(p, "classifier.4", F.dropout(x, 0.5))))


def fedavg(p, x):
    return fc(p, "classifier.2", F.relu(fc(p, "classifier.0", two_convolutions(p, x))))


LAYERS = {
    "LeNet5": (models.LeNet5(), lenet5),
    "VGG16": (models.VGG16(), vgg16),
    "CNN": (models.CNN(5), pfedmoe),
    "LEAFCNN": (models.LEAFCNN(conv1_channels=4, hidden=16), leaf),
    "IFCACNN": (models.IFCACNN(), ifca),
    "TwoConvCNN": (models.TwoConvCNN(), lambda p, x: dropped(p, two_convolutions(p, x))),
    "FedAvgCNN": (models.FedAvgCNN(), fedavg),
}


@pytest.mark.few(*(name for name in LAYERS if name != "VGG16"))
@pytest.mark.parametrize("name", LAYERS)
def test_a_network_is_its_papers_layers_in_their_order(name):
    network, by_hand = LAYERS[name]
    network = copy.deepcopy(network).double()
    x = 3 * torch.randn(2, *network.input_shape, dtype=torch.float64)
    torch.manual_seed(5)
    actual = network(x)
    torch.manual_seed(5)
    parameters = dict(network.named_parameters())
    expected = by_hand(parameters, x)
    torch.testing.assert_close(actual, expected)
    direction = torch.randn_like(actual)
    gradients = (torch.autograd.grad(y, [*parameters.values()], direction) for y in (actual, expected))
    torch.testing.assert_close(*gradients)


def test_bilstm_joins_the_states_behind_the_last_token_and_backwards_behind_the_first():
    expert = models.BiLSTM(20, 3, 4, 2).double()
    x = torch.randint(20, (5, 6))
    embedded = expert.extractor.embedding.weight[x]

    def last_state(suffix, steps):
        p = {name: getattr(expert.extractor.lstm, f"{name}_l0{suffix}") for name in ("weight_ih", "weight_hh")}
        b = sum(getattr(expert.extractor.lstm, f"{name}_l0{suffix}") for name in ("bias_ih", "bias_hh"))
        h = c = torch.zeros(5, 4, dtype=torch.float64)
        for t in steps:
            i, f, g, o = (embedded[:, t] @ p["weight_ih"].T + h @ p["weight_hh"].T + b).chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        return h

    expected = torch.cat((last_state("", range(6)), last_state("_reverse", reversed(range(6)))), dim=1)
    torch.testing.assert_close(expert.extractor(x), expected)
    torch.testing.assert_close(expert(x), expected @ expert.classifier.weight.T + expert.classifier.bias)


@pytest.mark.parametrize("make", [models.LEAFCNN, models.IFCACNN, models.GateCNN])
def test_relu_logits_are_the_logits_without_those_below_0(make):
    torch.manual_seed(0)
    network, plain = make(relu_logits=True).eval(), make().eval()
    plain.load_state_dict(network.state_dict())
    x = 5 * torch.randn(8, 3, 32, 32)
    logits = plain(x)
    assert (logits < 0).any() and (logits > 0).any()
    assert torch.equal(network(x), logits.clamp(min=0))


@pytest.mark.parametrize("make", [models.LEAFCNN, models.IFCACNN, models.GateCNN])
def test_initial_parameters_of_adaptive_expert_models_survive_drawing_all_layers_anew(make):
    network = make()
    before = copy.deepcopy(network.state_dict())
    for redrawn in (False, True):
        if redrawn:
            for layer in network.modules():
                if callable(reset := getattr(layer, "reset_parameters", None)):
                    reset()
        for name, layer in network.named_modules():
            if isinstance(layer, nn.Linear):
                assert (layer.bias == 0.01).all()
            if isinstance(layer, nn.Conv2d):
                bound = math.sqrt(6 / (25 * (layer.in_channels + layer.out_channels)))
                assert 0.95 * bound < layer.weight.abs().max() <= bound * (1 + 1e-6)
                assert layer.weight.var().item() == pytest.approx(bound**2 / 3, rel=0.15)
            if isinstance(layer, (nn.Conv2d, nn.Linear)):
                assert torch.equal(layer.weight, before[f"{name}.weight"]) is not redrawn


@pytest.mark.parametrize(
    ("network", "least"),
    [
        (models.TwoConvCNN, 16),
        (models.LEAFCNN, 16),
        (models.FedAvgCNN, 16),
        (models.GateCNN, 16),
        (models.ConvBlock, 6),
        (models.ConvExpert, 6),
    ],
)
def test_images_that_would_be_pooled_to_nothing_are_refused(network, least):
    smallest = network(image_size=least)
    assert smallest(torch.zeros(2, *smallest.input_shape)).isfinite().all()
    with pytest.raises(InvalidArgumentError, match=f"image_size is {least - 1}, but must be at least {least}, because"):
        network(image_size=least - 1)


@pytest.mark.slow
@pytest.mark.parametrize("network", [models.LeNet5, models.VGG16, models.CNN, models.IFCACNN])
def test_a_network_for_images_of_another_size_is_refused_by_both_sizes(network, tmp_path):
    federation = Federation(
        [Phase("A", FedAvg("global_expert.*"), gate=models.GlobalOnly())], default_root_dir=str(tmp_path)
    )
    refusal = (
        r"global_expert is .*, but must be a network for images of 8 x 8 pixels, .* it takes images of 32 x 32 pixels\."
    )
    with pytest.raises(InvalidArgumentError, match=refusal):
        federation.fit(models.PersonalizedMoE(network(in_channels=1)), Digits(num_clients=2))
