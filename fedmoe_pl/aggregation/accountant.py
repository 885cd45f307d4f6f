"""The epsilon of rounds or steps with Gaussian noise, by Opacus's accountant of Renyi differential privacy."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

_ORDERS = (*(1 + tenth / 10 for tenth in range(1, 100)), *range(11, 65), 128, 256, 512, 1024)
_FAST_ORDERS = (*range(2, 33), 40, 48, 64, 128)  # some of them, in a tenth of the time; epsilon is a little higher
_HIGHEST, _PRECISION = 1e6, 1.001  # of a noise multiplier that is searched for


def epsilon(rounds: Iterable[Sequence[float]], delta: float, orders: tuple[float, ...] = _ORDERS) -> float:
    """The smallest epsilon that is known for (epsilon, delta)-differential privacy.

    Two data sets are neighbors if one has one client more than the other. Every client joins each round with the same
    probability, independently of other clients and rounds; with probability 1, all of them do. In the same way, samples
    join the steps of a client's training.

    Args:
        rounds: for every kind of round, the probability, the noise multiplier and the number of such rounds.
        delta: the delta.
        orders: those of the Renyi divergences; the more, the lower the epsilon.

    Raises:
        MisconfigurationException: if Opacus is not installed.

    Example:
        >>> epsilon([], 1e-5), epsilon([(0.1, 0.0, 3)], 1e-5)
        (0.0, inf)
    """
    spent = np.zeros(len(orders))
    for probability, noise_multiplier, number in rounds:
        if number and not noise_multiplier:
            return float("inf")
        if number:
            spent += number * _of_one_round(probability, noise_multiplier, orders)
    if not spent.any():
        return 0.0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Optimal order is")  # with very little noise; epsilon holds all the same
        return max(float(_opacus().get_privacy_spent(orders=orders, rdp=spent, delta=delta)[0]), 0.0)


def noise_for(target: float, delta: float, probability: float, number: int, before: Sequence[Sequence[float]]) -> float:
    """The lowest noise multiplier, to a thousandth, with which rounds cost at most ``target`` with those before them.

    Infinite if they cost more whatever the noise.

    Example:
        >>> z = noise_for(3.0, 1e-5, 0.1, 100, [])
        >>> 2.9 < epsilon([(0.1, z, 100)], 1e-5) <= 3.0
        True
    """
    low, high = 0.0, 1.0
    while epsilon([*before, (probability, high, number)], delta, _FAST_ORDERS) > target:
        low, high = high, 2 * high
        if high > _HIGHEST:
            return float("inf")
    while high > _PRECISION * low and high > 0.01:
        middle = (low * high) ** 0.5 if low else high / 2
        if epsilon([*before, (probability, middle, number)], delta, _FAST_ORDERS) > target:
            low = middle
        else:
            high = middle
    return high


@lru_cache(maxsize=10_000)  # clients have probabilities of their own
def _of_one_round(probability: float, noise_multiplier: float, orders: tuple[float, ...]) -> np.ndarray:
    """The Renyi divergence of one round, for each of the orders."""
    return np.asarray(_opacus().compute_rdp(q=probability, noise_multiplier=noise_multiplier, steps=1, orders=orders))


@cache
def _opacus() -> Any:
    """One file of Opacus, an optional dependency: the whole package takes five seconds to import."""
    package = find_spec("opacus")
    if package is None or package.origin is None:
        raise MisconfigurationException(
            'Differential privacy needs Opacus: pip install ".[privacy]" in the repository.'
        )
    path = Path(package.origin).parent / "accountants/analysis/rdp.py"
    spec = spec_from_file_location("opacus_rdp", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
