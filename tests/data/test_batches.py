"""Arrays as batches: normalized and augmented as torchvision does it, every sample once, in an order of a seed."""

import pickle

import pytest
import torch
from helpers.data import Own, set_up
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms.functional import to_tensor
from torchvision.transforms.v2 import functional

from fedmoe_pl.data import Arrays, Batches, ClientSamples, Digits, RandomCrop, RandomHorizontalFlip


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


@given(st.lists(st.integers(0, 5), min_size=1, max_size=20), st.data())
@settings(max_examples=50, deadline=None)
def test_parts_are_those_of_a_list_of_tensors(sizes, draw):
    samples = torch.randperm(sum(sizes))
    parts, expected = ClientSamples(samples, torch.tensor(sizes)), list(samples.split(sizes))

    def as_lists(tensors):
        return [tensor.tolist() for tensor in tensors]

    assert len(parts) == len(expected) and as_lists(parts) == as_lists(expected)
    assert as_lists(parts[i] for i in range(-len(sizes), 0)) == as_lists(expected)
    assert as_lists(parts[1:-1:2]) == as_lists(expected[1:-1:2])
    chosen = draw.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=30))
    selected = parts.select(torch.tensor(chosen, dtype=torch.int64))
    assert as_lists(selected) == as_lists(expected[i] for i in chosen)
    assert selected.sizes.tolist() == [sizes[i] for i in chosen]
    assert parts.indices.data_ptr() == samples.data_ptr()  # nothing is copied
    with pytest.raises(IndexError):
        parts[len(sizes)]


def test_parts_are_pickled_as_two_tensors():
    parts = ClientSamples(torch.arange(10_000), torch.ones(10_000, dtype=torch.int64))
    pickled = pickle.dumps(parts)
    assert len(pickled) < 2 * 8 * 10_000 + 2000
    assert [part.tolist() for part in pickle.loads(pickled)] == [[i] for i in range(10_000)]


@given(st.integers(0, 600), st.integers(1, 300))
@settings(max_examples=25, deadline=None)
def test_batches_hold_every_sample_once(n, batch_size):
    x = torch.arange(1000.0)
    samples = torch.arange(1000)[-n:] if n else torch.arange(0)
    for shuffle in (False, True):
        batches = Batches(x, x.long(), samples, batch_size, shuffle=shuffle)
        seen = list(batches)
        assert len(seen) == len(batches)
        assert all(len(y) == batch_size for _, y in seen[:-1])
        assert [batches.size(index) for index in range(len(seen))] == [len(y) for _, y in seen]
        assert all(torch.equal(a.long(), b) for a, b in seen)
        ys = [label for _, y in seen for label in y.tolist()]
        assert (sorted(ys) if shuffle else ys) == samples.tolist()


def test_a_last_batch_of_one_sample_can_be_left_out_which_is_another_one_in_each_epoch():
    sizes = {9: [4, 4], 8: [4, 4], 6: [4, 2], 5: [4], 1: [1]}
    for n, expected in sizes.items():
        generator = torch.Generator().manual_seed(0)
        batches = Batches(torch.arange(20.0), torch.arange(20), torch.arange(n), 4, True, generator, drop_single=True)
        epochs = [[y for _, y in batches] for _ in range(40)]
        assert all([len(y) for y in epoch] == expected for epoch in epochs) and len(batches) == len(expected)
        assert {label for epoch in epochs for y in epoch for label in y.tolist()} == {*range(n)}


def test_a_generator_repeats_the_epochs():
    data = set_up(Digits(num_clients=2, augmentation=[RandomCrop(1), RandomHorizontalFlip()]))

    def two_epochs(seed):
        batches = data.batches(data.train_samples[0], 7, torch.Generator().manual_seed(seed), augment=True)
        return torch.cat([x for _ in range(2) for x, _ in batches])

    assert torch.equal(two_epochs(1), two_epochs(1)) and not torch.equal(two_epochs(1), two_epochs(2))
    first, second = two_epochs(1).chunk(2)
    assert not torch.equal(first, second)
    plain = torch.cat([x for x, _ in data.batches(data.train_samples[0], 7)])
    assert torch.equal(plain, data.x[data.train_samples[0]])
