"""The costs until a target, as means over seeds, and the target that is chosen where none is named."""

import math
from types import SimpleNamespace

import pytest
from helpers.reports import cost_rows

from fedmoe_pl.report.costs import Cost, cost_table, costs, default_target
from fedmoe_pl.report.tables import Choices, Condition, Method


def condition(metric="global_test", lower_is_better=False, **methods):
    """A condition of methods, each of which has a list of values for each seed; a round sends 30 bytes."""
    lower = {"lower_is_better": metric} if lower_is_better else {}
    found = []
    for label, seeds in methods.items():
        rows = [[*cost_rows(label, values, metric, spent=(10, 10, 7), **lower)] for values in seeds]
        runs = [SimpleNamespace(rounds=of_seed, summary=[]) for of_seed in rows]
        found.append(Method(label, label, runs, True))
    return Condition("", [], found, Choices())


def test_costs_are_means_over_the_seeds_that_reach_the_target_and_the_best_over_all():
    one = condition(A=[[0.5, 0.9], [0.1, 0.2, 0.3, 0.6], [0.3]])
    assert costs(one, "global_test", 0.5) == [
        Cost("A", 2, 3, *2 * [pytest.approx((1 + 4) / 2)], pytest.approx(75), pytest.approx(17.5), pytest.approx(0.6))
    ]
    assert cost_table(one, "global_test", 0.5).rows == [["A", "2.5 (2 of 3 seeds)", "75 B", "18 FLOP", "60.00"]]


def test_the_target_is_what_half_of_the_methods_reach_rounded_such_that_they_do():
    accuracies = condition(A=[[0.427]], B=[[0.2]], C=[[0.835, 0.3]], D=[[0.618]])
    assert default_target(accuracies, "global_test") == 0.61
    errors = condition("local_test_rmse", True, A=[[4.567]], B=[[2.341, 9.0]], C=[[1.234]], D=[[3.456]])
    assert default_target(errors, "local_test_rmse") == 2.4
    assert math.isnan(default_target(condition(A=[[0.004]]), "global_test"))


def test_the_cost_says_between_which_evaluations_the_target_was_reached():
    one = condition(A=[[0.1, 0.2, 0.6, 0.7]], B=[[0.1, 0.2, 0.3, 0.7]], C=[[0.1, 0.2, 0.3, 0.4]])
    for method, kept in zip(one.methods, ((1, 3), (3,), (1, 3)), strict=True):
        method.runs[0].rounds[:] = [method.runs[0].rounds[index] for index in kept]
    rounds = [row[1] for row in cost_table(one, "global_test", 0.5).rows]
    assert rounds == ["3 to 4", "1 to 4", "-"], "A is evaluated after 2 and 4 rounds, B after 4"
