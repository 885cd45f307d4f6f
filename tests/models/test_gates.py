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
