"""Gates that are trained: sizes, weights, and layers against definitions written out again."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import Expert, assert_same_bits, blobs, mixture
from helpers.backends import UNEQUAL, assert_agree, local_training, train
from helpers.models import count, samples, small_images
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.backends import TrainerBackend
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
    TwoConvCNN,
)


@given(st.integers(1, 5), st.integers(1, 40), st.floats(1e-3, 1e4), st.integers(0, 2**20), st.booleans())
@settings(max_examples=60, deadline=None)
def test_gate_weights_are_in_0_to_1_and_add_up_to_1_for_any_input(n, features, scale, seed, reads_features):
    generator = torch.Generator().manual_seed(seed)
    gate = FeatureGate(features) if reads_features else LinearGate(features)
    weights = gate(scale * torch.randn(n, features, generator=generator))
    assert weights.shape == (n, 2)
    assert ((weights >= 0) & (weights <= 1)).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(n))


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


def test_reset_parameters_draws_the_gate_anew():
    gate = LinearGate(5)
    before = copy.deepcopy(gate.state_dict())
    gate.reset_parameters()
    assert not torch.equal(gate.linear.weight, before["linear.weight"])
    torch.manual_seed(3)
    gate.reset_parameters()
    torch.manual_seed(3)
    assert_same_bits(gate.linear.state_dict(), nn.Linear(5, 1).state_dict())


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


def test_pfedmoes_gate_has_the_number_of_parameters_of_a_hidden_width_of_50():
    gate = SwitchNormGate()
    assert count(gate) == 160_004
    assert gate(torch.randn(3, 3, 32, 32)).shape == (3, 2)


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


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize(
    "gate",
    [
        NetworkGate(TwoConvCNN(1, 1, 16)),
        NetworkGate(GateCNN(1, 2, image_size=16)),
        NetworkGate(GateCNN(1, 5, image_size=16)),
        SwitchNormGate(256, 4),
    ],
)
def test_weights_are_at_least_0_and_add_up_to_1(gate, scale):
    weights = copy.deepcopy(gate)(scale * small_images())
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(1), torch.ones(4))


def test_a_mixture_takes_the_sigmoid_of_a_networks_one_output_as_the_local_experts_weight():
    network = nn.Linear(5, 1)
    module = mixture(NetworkGate(network))
    x = torch.randn(4, 5, dtype=torch.float64)
    h = torch.sigmoid(x @ network.weight.T + network.bias)
    torch.testing.assert_close(module(x), h * module.local_expert(x) + (1 - h) * module.global_expert(x))


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


def test_backends_agree_with_pfedmoes_gate():
    """The trial stacks it, though the gradients of biases before a normalization are what rounding leaves of 0."""
    training = local_training(mixture(SwitchNormGate(5, 4)), FedAvg(), blobs(UNEQUAL, batch_size=10))
    assert_agree(training, 1e-10)
    sent = train(TrainerBackend(), training)[0].sent
    for name in ("gate.layers.2.weight", "gate.layers.1.running_var"):
        assert (sent[name] - training.initial[name]).abs().max() > 1e-3
