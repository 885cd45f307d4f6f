"""Plans, groups and folding."""

import pytest
import torch
from helpers import blobs, mixture
from helpers.backends import UNEQUAL, local_training

from fedmoe_pl.algorithms import FedAvg
from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends import StackedBackend, TrainerBackend
from fedmoe_pl.backends.backend import fold


def test_groups_follow_from_the_cohort_alone():
    training = local_training(mixture(), FedAvg(), blobs(UNEQUAL))
    plan = TrainerBackend().plan(training)
    assert plan.groups([5, 2, 7]) == [[5], [2], [7]]
    assert StackedBackend(3).plan(training).groups(range(8)) == [[1, 5, 4], [6, 2, 3], [7, 0]]
    many = plan.groups(range(1000))
    assert len(many) <= 64 and [client for group in many for client in group] == list(range(1000))


def test_fold_is_the_weighted_mean():
    updates = [Update({"w": torch.tensor([float(value)])}, weight) for value, weight in ((0, 1), (4, 3), (2, 4))]
    folded = fold(Algorithm(), updates)
    assert folded.sent["w"].item() == pytest.approx((0 * 1 + 4 * 3 + 2 * 4) / 8)
    assert folded.weight == 8
