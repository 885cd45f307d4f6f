"""Gates of given weights."""

import math

import pytest
import torch
from helpers import mixture
from helpers.models import samples
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fedmoe_pl.models import ConstantGate


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
