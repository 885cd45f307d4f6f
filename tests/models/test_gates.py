"""Gates that are trained: sizes, weights, and layers against definitions written out again."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert
from helpers.models import count, samples
from torch import nn

from fedmoe_pl.models import (
    BiLSTM,
    FeatureGate,
    GateCNN,
    LeNet5,
    LinearGate,
    NetworkGate,
    PersonalizedMoE,
    SmallMLP,
    SwitchNormGate,
)


def test_linear_gate_is_the_sigmoid_of_a_linear_layer_on_the_flattened_input():
    gate, x = LinearGate(12), torch.randn(4, 3, 2, 2)
    logit = x.reshape(4, 12) @ gate.linear.weight[0] + gate.linear.bias
    expected = torch.stack([1 / (1 + (-logit).exp()), 1 - 1 / (1 + (-logit).exp())], dim=1)
    torch.testing.assert_close(gate(x), expected)


@pytest.mark.parametrize(
    ("expert", "gate", "in_features"),
    [
        (LeNet5(), FeatureGate(), 400),
        (LeNet5(3), LinearGate(), 3072),
        (SmallMLP(64, 20, 10), FeatureGate(), 20),
        (SmallMLP(64, 20, 10), LinearGate(), 64),
    ],
)
def test_a_gate_without_a_width_takes_it_from_the_expert(expert, gate, in_features):
    assert gate.in_features is None
    module = PersonalizedMoE(expert, gate=gate)
    assert module.gate.in_features == in_features
    assert module.gate.linear.weight.shape == (1, in_features)


def test_a_gate_without_a_width_takes_it_from_the_first_batch_where_the_expert_does_not_tell():
    module = PersonalizedMoE(Expert(), gate=FeatureGate())
    module(samples()[0])
    assert module.gate.in_features == 6


@pytest.mark.parametrize(
    ("network", "parameters", "outputs"),
    [
        (GateCNN(), 6_995, 7),
        (GateCNN(num_experts=2), 6_995 - 6 * 9, 1),  # six outputs of 8 weights and a bias fewer
        (GateCNN(conv2_channels=None), 912 + (12 * 14 * 14 * 8 + 8) + 63, 7),
        (GateCNN(1, 3, image_size=28), 312 + 3612 + (12 * 16 * 8 + 8) + 27, 3),
    ],
)
def test_the_gates_network_has_the_papers_number_of_parameters_and_an_output_per_expert(network, parameters, outputs):
    assert count(network) == parameters
    assert network(torch.randn(3, *network.input_shape)).shape == (3, outputs)


def fc(p, name, x):
    return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


@pytest.mark.parametrize("conv2_channels", [5, None])
@pytest.mark.parametrize("relu_logits", [False, True])
def test_the_gates_network_is_its_papers_layers_in_their_order_also_in_training(conv2_channels, relu_logits):
    network = GateCNN(2, 3, 4, conv2_channels, 6, dropout=0.4, relu_logits=relu_logits, image_size=16).double()
    x = torch.randn(50, 2, 16, 16, dtype=torch.float64)
    first, *second = (layer for layer in network.modules() if isinstance(layer, nn.Conv2d))
    hidden, last = (layer for layer in network.modules() if isinstance(layer, nn.Linear))
    for train in (False, True):
        h = F.max_pool2d(F.conv2d(x, first.weight, first.bias), 2).relu()
        torch.manual_seed(5)
        for layer in second:
            h = F.max_pool2d(F.dropout2d(F.conv2d(h, layer.weight, layer.bias), 0.4, train), 2).relu()
        h = F.dropout(F.linear(h.flatten(1), hidden.weight, hidden.bias).relu(), 0.4, train)
        logits = F.linear(h, last.weight, last.bias)
        torch.manual_seed(5)
        torch.testing.assert_close(network.train(train)(x), logits.relu() if relu_logits else logits)
        assert logits.min() < 0 < logits.max()


def constant_logits(*logits) -> nn.Linear:
    layer = nn.Linear(2, len(logits)).double()
    nn.init.zeros_(layer.weight)
    layer.bias.data = torch.tensor(logits, dtype=torch.float64)
    return layer


def test_a_network_with_one_output_weighs_the_local_expert_by_its_sigmoid():
    weights = NetworkGate(constant_logits(math.log(3)))(torch.zeros(4, 2, dtype=torch.float64))
    torch.testing.assert_close(weights, torch.tensor([[0.25, 0.75]] * 4, dtype=torch.float64))


def test_a_network_with_an_output_per_expert_weighs_them_in_order_by_a_softmax():
    gate = NetworkGate(constant_logits(0.0, math.log(2), math.log(5)))
    weights = gate(torch.zeros(4, 2, dtype=torch.float64))
    torch.testing.assert_close(weights, torch.tensor([[1 / 8, 2 / 8, 5 / 8]] * 4, dtype=torch.float64))


@pytest.mark.parametrize("gate", [NetworkGate(BiLSTM(9, 2, 3, 1)), SwitchNormGate(6, 4)])
def test_reset_parameters_draws_every_weight_of_a_gate_anew(gate):
    gate = copy.deepcopy(gate)
    weights = [p for p in gate.parameters() if p.dim() > 1]
    before = [weight.clone() for weight in weights]
    gate.reset_parameters()
    assert not any(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))


def test_pfedmoes_gate_is_its_papers_layers_in_their_order():
    gate = SwitchNormGate(12, 5).double()
    x = torch.randn(7, 3, 2, 2, dtype=torch.float64) + 1
    p = dict(gate.named_parameters())
    flat = x.reshape(7, 12)
    mean = (flat.mean(1, keepdim=True) + flat.mean(0)) / 2
    var = (flat.var(1, keepdim=True) + flat.var(0)) / 2

    def batch_norm(h):
        return (h - h.mean(0)) / (h.var(0, unbiased=False) + 1e-5).sqrt()

    hidden = batch_norm(fc(p, "layers.2", (flat - mean) / (var + 1e-5).sqrt())).sigmoid()
    expected = batch_norm(fc(p, "layers.5", hidden)).softmax(1)
    torch.testing.assert_close(gate(x), expected)


def test_pfedmoes_gate_keeps_a_share_of_its_first_layers_old_statistics():
    gate, (one, other) = SwitchNormGate(4, 3, momentum=0.75).double(), torch.randn(2, 6, 4, dtype=torch.float64)
    gate(one)
    gate(other)
    expected = 0.75 * 0.25 * one.mean(0) + 0.25 * other.mean(0)  # they start at 0
    torch.testing.assert_close(gate.layers[1].running_mean, expected)
