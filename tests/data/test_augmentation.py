"""Random crops and flips against torchvision."""

import torch
from torchvision.transforms.v2 import functional

from fedmoe_pl.data import RandomCrop, RandomHorizontalFlip


def test_crop_is_torchvisions_crop_of_the_image_padded_with_black():
    x = torch.randn(20, 3, 6, 5)
    black = torch.tensor([-1.0, 2.0, 0.5]).view(3, 1, 1)
    cropped = RandomCrop(2)(x, torch.Generator().manual_seed(3), black)
    top, left = torch.randint(5, (2, 20), generator=torch.Generator().manual_seed(3)).tolist()
    for i in range(20):
        # cropping before normalization pads with 0, which normalization then turns into black
        padded = functional.pad(x[i] - black, [2])
        expected = functional.crop(padded, top[i], left[i], 6, 5) + black
        torch.testing.assert_close(cropped[i], expected)
    assert len({*top}) == len({*left}) == 5


def test_flip_mirrors_each_image_by_itself():
    x = torch.randn(200, 1, 3, 4)
    before = x.clone()
    flipped = RandomHorizontalFlip()(x, torch.Generator().manual_seed(0))
    mirrored = (flipped == x.flip(-1)).flatten(1).all(1)
    same = (flipped == x).flatten(1).all(1)
    assert torch.all(mirrored ^ same) and 70 < mirrored.sum() < 130
    assert torch.equal(x, before)
    assert torch.equal(RandomHorizontalFlip(0)(x), x)
    assert torch.equal(RandomHorizontalFlip(1)(x), x.flip(-1))
