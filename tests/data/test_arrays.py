"""Normalization of images, and ids of words."""

import torch
from helpers.data import Own, set_up
from torchvision.transforms.functional import to_tensor
from torchvision.transforms.v2 import functional

from fedmoe_pl.data import Arrays


def test_images_are_normalized_like_torchvision():
    torch.manual_seed(0)
    x = torch.randint(0, 256, (7, 3, 4, 5), dtype=torch.uint8)
    mean, std = [0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.2010]
    data = set_up(
        Own(Arrays(x[:5], torch.zeros(5).long(), x[5:], torch.ones(2).long(), mean=mean, std=std), num_clients=1)
    )
    for i in range(7):
        expected = functional.normalize(to_tensor(x[i].permute(1, 2, 0).numpy()), mean, std)
        assert torch.equal(data.x[i], expected)
    assert data.x.dtype == torch.float32 and data.y.dtype == torch.int64
    black = functional.normalize(torch.zeros(3, 1, 1), mean, std)
    assert torch.equal(data.black, black)


def test_without_constants_the_training_images_have_mean_zero_and_deviation_one():
    torch.manual_seed(0)
    x = torch.randint(0, 256, (50, 2, 4, 4), dtype=torch.uint8)
    x[:, 1] = 7  # of one single value: no division by zero
    data = set_up(Own(Arrays(x[:40], torch.zeros(40).long(), x[40:], torch.ones(10).long()), num_clients=1))
    train = data.x[:40].double()
    torch.testing.assert_close(train.mean((0, 2, 3)), torch.zeros(2).double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(train.std((0, 2, 3), correction=0), torch.tensor([1.0, 0.0]).double(), atol=1e-6, rtol=0)


def test_ids_of_words_are_taken_as_they_are_into_batches():
    x = torch.tensor([[5, 2**40], [7, 0], [1, 1]])  # float32 would not hold the large one + 1
    x[0, 1] += 1
    y = torch.tensor([0, 1, 0])
    data = set_up(Own(Arrays(x, y, x[:1], y[:1]), num_clients=1))
    assert torch.equal(data.x, torch.cat((x, x[:1]))) and data.x.dtype == torch.int64
    assert data.black.tolist() == [[[0.0]]]
    ((batch, labels),) = data.batches(data.train_samples[0])
    order = data.train_samples[0]
    assert torch.equal(batch, x[order]) and torch.equal(labels, y[order])
