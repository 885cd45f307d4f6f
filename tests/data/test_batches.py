"""Batches: every sample once, and what their order depends on."""

import torch
from helpers.data import Own, set_up, vectors
from hypothesis import given, settings
from hypothesis import strategies as st

from fedmoe_pl.data import Batches, Digits, RandomCrop, RandomHorizontalFlip


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


def test_a_generator_repeats_the_epochs_and_no_generator_follows_the_global_seed():
    data = set_up(Digits(num_clients=2, augmentation=[RandomCrop(1), RandomHorizontalFlip()]))

    def two_epochs(batches):
        return torch.cat([x for _ in range(2) for x, _ in batches])

    def seeded(seed):
        return two_epochs(data.batches(data.train_samples[0], 7, torch.Generator().manual_seed(seed), augment=True))

    assert torch.equal(seeded(1), seeded(1)) and not torch.equal(seeded(1), seeded(2))
    first, second = seeded(1).chunk(2)
    assert not torch.equal(first, second)
    pooled = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        pooled.append(two_epochs(data.train_dataloader()))
    assert torch.equal(pooled[0], pooled[1]) and not torch.equal(pooled[0], pooled[2])
    plain = torch.cat([x for x, _ in data.batches(data.train_samples[0], 7)])
    assert torch.equal(plain, data.x[data.train_samples[0]])


def test_a_plain_trainer_gets_the_training_samples_in_another_order_in_every_epoch():
    data = set_up(Own(vectors(50), num_clients=2))
    first, second = (torch.cat([x for x, _ in data.train_dataloader()]).flatten().tolist() for _ in range(2))
    assert sorted(first) == sorted(second) == [*range(50)]
    assert len({(*first,), (*second,), (*data.train_samples.indices.tolist(),)}) == 3
