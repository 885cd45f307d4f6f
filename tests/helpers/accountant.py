"""An accountant of its own: Renyi divergences of single steps by numerical integration, added up by hand."""

import math
from functools import cache

import numpy as np

ORDERS = np.array([1 + tenth / 10 for tenth in range(1, 100)] + [*range(11, 65)])


def epsilon_of(steps, delta):
    """Epsilon of steps (noise multiplier, probability of a sample, number); 0 of none, infinite without noise.

    The divergence is of a Gaussian from its mixture with one that is shifted by 1 (Mironov et al. 2019,
    https://arxiv.org/abs/1908.10530), and becomes epsilon as in Canonne et al. 2020, Proposition 12.
    """
    if any(number and not noise for noise, _, number in steps):
        return math.inf
    spent = sum((number * _divergence(noise, probability) for noise, probability, number in steps), np.zeros(1))
    if not spent.any():
        return 0.0
    return float((spent + np.log1p(-1 / ORDERS) - (math.log(delta) + np.log(ORDERS)) / (ORDERS - 1)).min())


@cache
def _divergence(noise, probability):
    x = np.linspace(-15 * noise, ORDERS[-1] + 15 * noise, 4001)
    log_p = -(x**2) / (2 * noise**2) - math.log(noise * math.sqrt(2 * math.pi))
    rest = math.log1p(-probability) if probability < 1 else -math.inf
    log_ratio = np.logaddexp(rest, math.log(probability) + (2 * x - 1) / (2 * noise**2))
    exponents = log_p + ORDERS[:, None] * log_ratio
    largest = exponents.max(1)
    sums = np.exp(exponents - largest[:, None]).sum(1) * (x[1] - x[0])
    return (largest + np.log(sums)) / (ORDERS - 1)
