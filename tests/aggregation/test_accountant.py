"""Epsilon against dp-accounting of Google and a closed form."""

import math
from importlib.util import find_spec

import numpy as np
import pytest

from fedmoe_pl.aggregation.accountant import epsilon, noise_for

pytestmark = pytest.mark.skipif(find_spec("opacus") is None, reason="needs Opacus")

# (probability, noise multiplier, rounds, delta): dp-accounting 0.6.0's RDP, and its tighter PLD (2026-11-22)
GOOGLE = {
    (0.1, 1.0, 100, 1e-5): (7.903850223578231, 7.04660287720805),
    (1.0, 2.0, 10, 1e-5): (8.079406222420491, 7.511275931204883),
    (0.05, 0.7, 500, 1e-6): (20.37727331262665, 18.521670577209317),
    (0.5, 4.0, 30, 1e-3): (2.3525760683395616, 2.05305239392599),
}


@pytest.mark.parametrize("setting", GOOGLE)
def test_epsilon_is_that_of_dp_accounting(setting):
    *rounds, delta = setting
    by_rdp, tight = GOOGLE[setting]
    assert epsilon([rounds], delta) == pytest.approx(by_rdp, rel=4e-3)
    assert tight < epsilon([rounds], delta) < by_rdp * 1.0001


def test_without_sampling_it_is_the_closed_form():
    """The Renyi divergence of order a of Gaussians is a / (2 z^2) (Mironov 2017), in n rounds n times that."""
    z, n, delta = 3.0, 7, 1e-5
    a = np.arange(1.1, 64, 0.1)
    by_order = n * a / (2 * z**2) - (math.log(delta) + np.log(a)) / (a - 1) + np.log((a - 1) / a)
    assert epsilon([(1.0, z, n)], delta) == pytest.approx(by_order.min(), rel=1e-4)


def test_rounds_add_up():
    assert epsilon([(0.1, 1.0, 60), (0.1, 1.0, 40)], 1e-5) == epsilon([(0.1, 1.0, 100)], 1e-5)
    both = epsilon([(0.1, 1.0, 60), (0.5, 2.0, 3)], 1e-5)
    assert max(epsilon([(0.1, 1.0, 60)], 1e-5), epsilon([(0.5, 2.0, 3)], 1e-5)) < both
    assert epsilon([], 1e-5) == epsilon([(0.1, 0.0, 0)], 1e-5) == 0
    assert epsilon([(0.1, 0.0, 1), (0.5, 2.0, 3)], 1e-5) == math.inf


def test_the_noise_that_is_found_counts_the_rounds_before():
    before = [(0.1, 1.0, 30)]
    z = noise_for(6.0, 1e-5, 0.2, 50, before)
    assert 5.9 < epsilon([*before, (0.2, z, 50)], 1e-5) <= 6.0


def test_very_weak_and_very_strong_noise_have_an_epsilon_too():
    assert epsilon([(0.01, 1e4, 1)], 1e-2) < 1e-2
    assert epsilon([(1.0, 0.02, 10)], 1e-5) > 1000
