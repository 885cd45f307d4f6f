"""FedAvgM, FedAdagrad, FedAdam and FedYogi against the paper's formulas in plain numbers."""

import math
from functools import partial

import pytest
import torch
from helpers import PureOneWeight, phase, run, two_quadratics
from helpers.quadratics import LOSSES, RATE, STEPS, weight_of
from torch import nn

from fedmoe_pl.algorithms import FedAdagrad, FedAdam, FedAvg, FedYogi

TAU = 0.3
BETA1, BETA2 = 0.6, 0.7


def second_moment(name, v, squared):
    """Algorithm 2: how each optimizer changes v, in plain numbers."""
    if name == "FedAdagrad":
        return v + squared
    if name == "FedAdam":
        return BETA2 * v + (1 - BETA2) * squared
    return v - (1 - BETA2) * squared * math.copysign(1.0, v - squared)


def simulate(name, rounds, lr, start):
    """Rounds of both clients in plain numbers; clients weigh the same."""
    x, m, v = start, 0.0, TAU**2
    for _ in range(rounds):
        ends = []
        for a, b in LOSSES:
            y = x
            for _ in range(STEPS):
                y -= RATE * a * (y - b)
            ends.append(y)
        delta = sum(ends) / 2 - x
        if name == "FedAvgM":
            m = BETA1 * m + delta
            x += lr * m
            continue
        m = BETA1 * m + (1 - BETA1) * delta
        v = second_moment(name, v, delta**2)
        x += lr * m / (math.sqrt(v) + TAU)
    return x


OPTIMIZERS = {
    "FedAvgM": partial(torch.optim.SGD, lr=0.7, momentum=BETA1),
    "FedAdagrad": partial(FedAdagrad, lr=0.7, beta1=BETA1, tau=TAU),
    "FedAdam": partial(FedAdam, lr=0.7, beta1=BETA1, beta2=BETA2, tau=TAU),
    "FedYogi": partial(FedYogi, lr=0.7, beta1=BETA1, beta2=BETA2, tau=TAU),
}


@pytest.mark.few("FedAdam-4-0.0")
@pytest.mark.parametrize("start", [0.0, 6.0])
@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_server_takes_the_steps_of_the_paper(name, rounds, start, tmp_path):
    """Yogi's sign is negative in the first round and positive later, when the changes are small."""
    it = phase("it", FedAvg(), rounds=rounds, server_optimizer=OPTIMIZERS[name])
    federation = run([it], PureOneWeight(RATE, start), two_quadratics(), tmp_path, STEPS)
    assert weight_of(federation, "it") == pytest.approx(simulate(name, rounds, 0.7, start), rel=1e-12)


def stepped(optimizer, gradients, start=2.0):
    x = nn.Parameter(torch.tensor([start, -start], dtype=torch.float64))
    optimizer = optimizer([x])
    for gradient in gradients:
        x.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return x.detach()


def test_the_first_steps_of_adam_and_yogi_are_the_same_if_v_starts_at_0():
    first = [(0.5, -3.0)]
    assert torch.equal(*(stepped(partial(each, lr=0.1, v0=0.0), first) for each in (FedAdam, FedYogi)))
    assert not torch.equal(*(stepped(partial(each, lr=0.1), first) for each in (FedAdam, FedYogi)))


@pytest.mark.parametrize("optimizer", [FedAdagrad, FedAdam, FedYogi])
def test_nothing_moves_without_a_change_and_without_momentum(optimizer):
    assert stepped(partial(optimizer, lr=0.1), [(0.0, 0.0)]).tolist() == [2.0, -2.0]


def test_a_parameter_without_a_gradient_is_left_out():
    x = nn.Parameter(torch.ones(1))
    optimizer = FedAdam([x], lr=0.1)
    optimizer.step()
    assert x.item() == 1 and not optimizer.state
