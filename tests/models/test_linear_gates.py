"""The gates of PFL-MoE."""

import copy

import pytest
import torch
from helpers import Expert, assert_same_bits
from helpers.models import samples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedmoe_pl.models import (
    FeatureGate,
    LeNet5,
    LinearGate,
    PersonalizedMoE,
    SmallMLP,
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
