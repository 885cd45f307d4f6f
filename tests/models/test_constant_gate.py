"""Gates of given weights."""

import math

import pytest
import torch
from helpers import mixture
from helpers.models import samples
from hypothesis import given
from hypothesis import strategies as st
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from fedmoe_pl.models import (
    ConstantGate,
    PersonalizedMoE,
    RepresentationMoE,
    SmallMLP,
)


@given(st.floats(0, 1), st.integers(1, 5))
def test_constant_gate_gives_every_sample_its_weight_first(weight, n):
    weights = ConstantGate(weight)(torch.zeros(n, 3, dtype=torch.float64))
    torch.testing.assert_close(weights, torch.tensor([[weight, 1 - weight]] * n, dtype=torch.float64), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("weight", "expert", "other"), [(1, "global_expert", "local_expert"), (0, "local_expert", "global_expert")]
)
def test_constant_gate_of_1_or_0_is_bitwise_the_one_expert_whatever_the_other_gives(weight, expert, other):
    x, _ = samples()
    module = mixture(ConstantGate(weight), dtype=torch.float32)
    for parameter in getattr(module, other).parameters():
        nn.init.constant_(parameter, math.nan)
    assert torch.equal(module(x), getattr(module, expert)(x))


@pytest.mark.parametrize("gate", [None, ConstantGate(0.5)])
def test_constant_gate_of_a_half_is_the_default_and_the_mean_of_the_experts(gate):
    x, _ = samples()
    module = mixture(gate, dtype=torch.float32)
    assert torch.equal(module(x), (module.global_expert(x) + module.local_expert(x)) / 2)


@pytest.mark.parametrize("weight", [-0.1, 1.1, math.nan])
def test_a_constant_weight_outside_0_to_1_is_refused(weight):
    with pytest.raises(MisconfigurationException, match=rf"ConstantGate: weight is {weight}, but must be from 0 to 1"):
        ConstantGate(weight)


@pytest.mark.parametrize("weights", [[1.0], [0.0, 0.0, 1.0]])
def test_a_constant_gate_of_another_number_of_experts_is_refused(weights):
    gate = ConstantGate(weights)
    with pytest.raises(MisconfigurationException, match=f"PersonalizedMoE: gate .* weighs {len(weights)} experts, but"):
        PersonalizedMoE(SmallMLP(), gate=gate)
    with pytest.raises(
        MisconfigurationException, match=f"RepresentationMoE: gate .* weighs {len(weights)} experts, but"
    ):
        RepresentationMoE(SmallMLP(), [SmallMLP()], gate=gate)
