"""Switchable normalization against its definition written out again."""

import copy
import math

import numpy as np
import pytest
import torch
from helpers import assert_same_bits
from torch import nn
from torch.func import functional_call

from fedmoe_pl.models import SwitchNorm1d


def drawn_norm(features=4, momentum=0.9) -> SwitchNorm1d:
    norm = SwitchNorm1d(features, momentum).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in norm.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return norm


class ByHand:
    """SwitchNorm1d, number by number; variances divide by one less than their numbers."""

    def __init__(self, norm: SwitchNorm1d):
        self.p = {name: parameter.detach().numpy() for name, parameter in norm.named_parameters()}
        self.momentum = norm.momentum
        self.running = [(0.0, 0.0)] * norm.num_features

    def __call__(self, x, training):
        result = np.empty_like(x)
        shares = {name: np.exp(self.p[name]) / np.exp(self.p[name]).sum() for name in ("mean_weight", "var_weight")}
        for d in range(x.shape[1]):
            feature = (x[:, d].mean(), x[:, d].var(ddof=1)) if training else self.running[d]
            for b in range(x.shape[0]):
                mean = shares["mean_weight"] @ (x[b].mean(), feature[0])
                var = shares["var_weight"] @ (x[b].var(ddof=1), feature[1])
                result[b, d] = (x[b, d] - mean) / math.sqrt(var + 1e-5) * self.p["weight"][d] + self.p["bias"][d]
            if training:
                m = self.momentum
                self.running[d] = tuple(m * o + (1 - m) * n for o, n in zip(self.running[d], feature, strict=True))
        return result


@pytest.mark.parametrize("momentum", [0.9, 0.997])
def test_switch_norm_is_its_definition_in_every_step_and_in_eval_mode(momentum):
    norm = drawn_norm(momentum=momentum)
    by_hand = ByHand(norm)
    generator = torch.Generator().manual_seed(1)
    for training in (False, True, True, True, False, True, False):
        x = 2 * torch.randn(5, 4, generator=generator, dtype=torch.float64) + 3
        actual = norm.train(training)(x)
        torch.testing.assert_close(actual, torch.from_numpy(by_hand(x.numpy(), training)))
        running = torch.tensor(by_hand.running, dtype=torch.float64)
        torch.testing.assert_close(norm.running_mean, running[:, 0])
        torch.testing.assert_close(norm.running_var, running[:, 1])


def test_switch_norm_starts_as_the_mean_of_both_statistics_with_running_ones_at_0():
    norm = SwitchNorm1d(3)
    assert {name: tensor.tolist() for name, tensor in norm.state_dict().items()} == {
        "weight": [1, 1, 1],
        "bias": [0, 0, 0],
        "mean_weight": [1, 1],
        "var_weight": [1, 1],
        "running_mean": [0, 0, 0],
        "running_var": [0, 0, 0],
    }
    assert norm.momentum == 0.9
    other = drawn_norm(3).float()
    other(torch.randn(4, 3))
    other.reset_parameters()
    assert_same_bits(other.state_dict(), norm.state_dict())


@pytest.mark.parametrize("training", [False, True])
def test_switch_norm_has_the_gradients_of_finite_differences(training):
    norm = drawn_norm()
    norm(torch.randn(5, 4, dtype=torch.float64))
    norm.train(training)
    names = [name for name, _ in norm.named_parameters()]

    def call(x, *values):
        return functional_call(copy.deepcopy(norm), dict(zip(names, values, strict=True)), (x,))

    inputs = [torch.randn(5, 4, dtype=torch.float64), *(parameter.detach() for parameter in norm.parameters())]
    assert torch.autograd.gradcheck(call, [value.requires_grad_() for value in inputs])


def test_switch_norm_refuses_a_batch_of_one_in_train_mode_as_batch_norm_does():
    norm, x = SwitchNorm1d(3), torch.randn(1, 3)
    for layer in (norm, nn.BatchNorm1d(3)):
        with pytest.raises(ValueError, match="Expected more than 1 value per channel when training"):
            layer(x)
    assert not norm.running_var.any()
    assert norm.eval()(x).isfinite().all()
    with pytest.raises(ValueError, match=r"expected 2D input \(got 3D input\)"):
        norm(x[None])


def test_switch_norm_called_functionally_changes_the_buffers_it_is_given_and_not_its_own():
    norm, x = SwitchNorm1d(3), torch.randn(4, 3)
    state = {name: tensor.detach().clone() for name, tensor in norm.state_dict().items()}
    functional_call(norm, state, (x,))
    assert not norm.running_mean.any() and not norm.running_var.any()
    torch.testing.assert_close(state["running_mean"], 0.1 * x.mean(0))
    torch.testing.assert_close(state["running_var"], 0.1 * x.var(0))
