"""Per-class means of one client, and of several."""

import pytest
import torch
from helpers import Expert, assert_same_bits, mixture
from helpers.prototypes import without_a_class
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.algorithms.shared.class_means import class_means, combine_class_means, mean_of_known


def client(samples, data, module=None):
    return Client(0, 0, 0, module or mixture(), samples, {}, data)


def features(module, x):
    return module.global_expert.extractor(x)


def test_a_client_without_samples_has_no_means():
    tree = class_means(client(torch.arange(0), without_a_class()), features, "p/")
    assert tree["p/mean"].shape == (3, 6) and not tree["p/mean"].any() and tree["p/count"].tolist() == [0, 0, 0]


def test_dropout_is_not_active_and_the_client_s_module_stays_in_train_mode():
    data, module = without_a_class(), mixture(expert=Expert(dropout=0.5))
    here = client(data.train_samples[0], data, module)
    assert_same_bits(class_means(here, features, "p/"), class_means(here, features, "p/"))
    assert module.training and module.global_expert.extractor[0].training


def tree(mean, count):
    return {"p/mean": torch.tensor(mean)[:, None], "p/count": torch.tensor(count)}


def test_the_means_of_two_groups_are_weighed_class_by_class_and_exact_if_one_has_none():
    third = 1 / 3
    both = combine_class_means(tree([1.0, third, 0.0], [1, 3, 0]), tree([4.0, 0.0, third], [2, 0, 7]), "p/")
    assert both["p/count"].tolist() == [3, 3, 7]
    assert both["p/mean"][0].item() == pytest.approx(3.0)
    assert both["p/mean"][1:].flatten().tolist() == torch.tensor([third, third]).tolist()


def test_unknown_classes_count_as_0_and_samples_without_a_label_not_at_all():
    values, y = torch.tensor([1.0, 10.0, 3.0, 100.0]), torch.tensor([0, 1, 0, -100])
    assert mean_of_known(values, y, torch.tensor([True, False])).item() == pytest.approx(4 / 3)


def test_means_of_different_widths_are_refused_also_those_that_would_be_broadcast():
    narrow, wide = ({"mean": torch.zeros(3, width), "count": torch.ones(3)} for width in (1, 6))
    with pytest.raises(MisconfigurationException, match="features of widths 1 and 6"):
        combine_class_means(narrow, wide, "")
