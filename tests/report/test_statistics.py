"""Mean and deviation over seeds, and the paired test, against calculations by hand."""

import math
from itertools import product

import pytest

from fedmoe_pl.report.statistics import OverSeeds, over_seeds, paired_difference


def exact_p(differences: list[float]) -> float:
    """The two-sided p value of the signed-rank test, from all 2^n signs that the differences might have had."""
    ranks = {value: rank for rank, value in enumerate(sorted(map(abs, differences)), 1)}
    observed = sum(ranks[abs(value)] for value in differences if value > 0)
    total = sum(ranks.values())
    smaller = min(observed, total - observed)
    sums = [sum(chosen) for chosen in product(*((0, rank) for rank in ranks.values()))]
    return min(1.0, 2 * sum(value <= smaller for value in sums) / len(sums))


def test_the_p_value_counts_the_signs_that_are_as_extreme():
    ours = [{0: 0.50, 1: 0.60, 2: 0.30}, {0: 0.80, 1: 0.55}]
    theirs = [{0: 0.41, 1: 0.40, 2: 0.35}, {0: 0.50, 1: 0.54}]
    differences = [0.09, 0.20, -0.05, 0.30, 0.01]
    found = paired_difference(ours, theirs)
    assert found.p_value == pytest.approx(exact_p(differences)) == pytest.approx(2 * 3 / 32)
    assert found.mean == pytest.approx(((0.09 + 0.20 - 0.05) / 3 + (0.30 + 0.01) / 2) / 2)
    assert found.pairs == 5 and not found.is_more_than_noise


def test_differences_that_are_equal_but_for_rounding_have_one_rank():
    ours, theirs = [[8, 6, 3, 9, 2], [7, 5, 5, 5, 5]]
    assert 8 / 10 - 7 / 10 > 6 / 10 - 5 / 10
    in_tenths, in_units = (
        paired_difference(*([{i: each / unit for i, each in enumerate(side)}] for side in (ours, theirs)))
        for unit in (10, 1)
    )
    assert in_tenths.p_value == in_units.p_value
    assert paired_difference([{0: 0.8, 1: 0.6}], [{0: 0.7, 1: 0.5}]).pairs == 1, "the same difference of all clients"


def test_the_same_difference_of_all_clients_of_a_seed_is_one_pair():
    ours = [dict.fromkeys(range(100), value) for value in (0.6, 0.7, 0.8)]
    theirs = [dict.fromkeys(range(100), 0.5) for _ in ours]
    found = paired_difference(ours, theirs)
    assert found.pairs == 3 and found.p_value == exact_p([0.1, 0.2, 0.3]) == 0.25
    assert not found.is_more_than_noise


def test_a_difference_is_marked_only_if_every_seed_agrees():
    better, worse = ({client: 0.5 + sign * client / 100 for client in range(1, 21)} for sign in (1, -0.1))
    baseline = dict.fromkeys(range(1, 21), 0.5)
    both = paired_difference([better, worse], [baseline] * 2)
    assert both.p_value < 0.05 and not both.is_more_than_noise
    assert paired_difference([better] * 2, [baseline] * 2).is_more_than_noise
    assert not paired_difference([better], [baseline]).is_more_than_noise  # one seed


def test_equal_methods_and_missing_clients():
    equal = paired_difference([{0: 0.5, 1: 0.6}], [{0: 0.5, 1: 0.6}])
    assert (equal.mean, equal.p_value, equal.is_more_than_noise) == (0, 1, False)
    left_out = paired_difference([{0: 0.5, 1: math.nan, 2: 0.5}], [{0: 0.4, 1: 0.3}])
    assert left_out.pairs == 1
    assert math.isnan(paired_difference([{0: math.nan}], [{0: 0.5}]).p_value)


def test_the_deviation_over_seeds_is_that_of_a_sample():
    assert over_seeds([0.1, 0.2, 0.3]) == OverSeeds(pytest.approx(0.2), pytest.approx(0.1))
    assert math.isnan(over_seeds([0.5]).std)
