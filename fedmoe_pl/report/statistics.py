"""Mean and standard deviation over seeds, and whether two methods differ by more than noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import wilcoxon

SIGNIFICANCE = 0.05
INDEPENDENCE = (
    "The test is over clients and seeds. Clients of one seed share a global model, a partition and the order of "
    "training, so they are not independent of each other; seeds are. A small p alone therefore says that a difference "
    "holds for these clients in these runs. It is marked only if it also has the same sign in every seed, of at least "
    "two. p is not corrected for the number of methods."
)
"""What the test says and does not say, for the legend of a table."""


class Spread(NamedTuple):
    """Mean and standard deviation of a value over seeds.

    Attributes:
        mean: the mean.
        std: the sample standard deviation (n - 1 in the denominator); nan for a single seed.
        seeds: the number of seeds.
    """

    mean: float
    std: float
    seeds: int


class Difference(NamedTuple):
    """The difference of a method to a baseline, and a test of whether it is more than noise.

    Attributes:
        mean: mean over seeds of the mean over clients; above 0 if the method is better.
        p_value: of the two-sided Wilcoxon signed-rank test; 1 if all differences are 0, nan if there is no pair.
        pairs: number of pairs of the test.
        seeds: number of seeds in which both methods were run.
        same_sign: whether the mean difference has the same sign, and is not 0, in every seed.
    """

    mean: float
    p_value: float
    pairs: int
    seeds: int
    same_sign: bool

    @property
    def is_more_than_noise(self) -> bool:
        """Whether the test finds a difference that every seed, of at least two, agrees with."""
        return self.p_value < SIGNIFICANCE and self.same_sign and self.seeds > 1


def over_seeds(values: Sequence[float]) -> Spread:
    """Mean and sample standard deviation of a value over seeds.

    Example:
        >>> over_seeds([1.0, 2.0, 3.0])
        Spread(mean=2.0, std=1.0, seeds=3)
    """
    std = float(np.std(values, ddof=1)) if len(values) > 1 else math.nan
    return Spread(float(np.mean(values)), std, len(values))


def paired_difference(method: Sequence[Mapping[int, float]], baseline: Sequence[Mapping[int, float]]) -> Difference:
    """Compares two methods by a Wilcoxon signed-rank test, paired over the clients of each seed.

    Where the difference is the same for all clients of a seed, it counts as one pair: both methods have one model for
    all clients, and the global test set is the same for all of them.
    """
    pairs, means = list[float](), list[float]()
    for ours, theirs in zip(method, baseline, strict=True):
        differences = [ours[client] - theirs[client] for client in ours if client in theirs]
        differences = [difference for difference in differences if not math.isnan(difference)]
        if differences:
            pairs += differences[:1] if len(set(differences)) == 1 else differences
            means.append(float(np.mean(differences)))
    if not pairs:
        return Difference(math.nan, math.nan, 0, 0, False)
    p_value = float(np.asarray(wilcoxon(pairs))[1]) if any(pairs) else 1.0
    same_sign = all(mean > 0 for mean in means) or all(mean < 0 for mean in means)
    return Difference(float(np.mean(means)), p_value, len(pairs), len(means), same_sign)
