"""Mean and deviation over seeds, and the paired test of two methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import wilcoxon

SIGNIFICANCE = 0.05
_DIGITS = 6  # to which differences are compared: 0.7 - 0.6 and 0.6 - 0.5 differ in rounding only


class OverSeeds(NamedTuple):
    """Mean and sample standard deviation of a value over seeds; the latter is nan for a single seed."""

    mean: float
    std: float


class Difference(NamedTuple):
    """The difference of a method to a baseline, and a test of whether it is more than noise."""

    mean: float  # over seeds of the mean over clients
    p_value: float  # of the two-sided Wilcoxon signed-rank test; 1 if all differences are 0, nan if there is no pair
    pairs: int
    is_more_than_noise: bool  # the test finds a difference, of the same sign in every seed of at least two


def over_seeds(values: Sequence[float]) -> OverSeeds:
    """Mean and sample standard deviation of a value over seeds."""
    return OverSeeds(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else math.nan)


def paired_difference(method: Sequence[Mapping[int, float]], baseline: Sequence[Mapping[int, float]]) -> Difference:
    """Compares two methods by a Wilcoxon signed-rank test, paired over the clients of each seed.

    Where the difference is the same for all clients of a seed, as between two global models, it counts as one pair.
    """
    of_seeds = list[list[float]]()
    for ours, theirs in zip(method, baseline, strict=True):
        differences = [ours[client] - theirs[client] for client in ours if client in theirs]
        of_seeds.append([difference for difference in differences if not math.isnan(difference)])
    means = [float(np.mean(differences)) for differences in of_seeds if differences]
    if not means:
        return Difference(math.nan, math.nan, 0, False)
    largest = max(abs(difference) for differences in of_seeds for difference in differences) or 1.0
    pairs = list[float]()
    for differences in of_seeds:
        equal = [round(difference / largest, _DIGITS) for difference in differences]  # ranks are of values in any unit
        pairs += equal[:1] if len({*equal}) == 1 else equal
    p_value = float(np.asarray(wilcoxon(pairs))[1]) if any(pairs) else 1.0
    same_sign = all(mean > 0 for mean in means) or all(mean < 0 for mean in means)
    is_more_than_noise = p_value < SIGNIFICANCE and same_sign and len(means) > 1
    return Difference(float(np.mean(means)), p_value, len(pairs), is_more_than_noise)
