"""The digits of scikit-learn."""

import pytest
import torch
from helpers.data import set_up

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import Digits


def test_digits_are_split_by_class_and_scaled():
    data = set_up(Digits(num_clients=10))
    assert data.x.shape == (1797, 1, 8, 8) and data.num_classes == 10
    assert data.x.min() == 0 and data.x.max() == 1
    train, test = (torch.bincount(data.y[part]) for part in (data.train_samples.indices, data.global_test))
    assert torch.equal(test, (train + test) // 5)
    assert set_up(Digits(num_clients=10, image_size=32)).x.shape == (1797, 1, 32, 32)


def test_images_have_a_height_of_at_least_one_pixel():
    with pytest.raises(InvalidArgumentError, match="Digits: image_size is -3, but must be an integer from 1 "):
        set_up(Digits(num_clients=10, image_size=-3))
