"""Batches, normalized and augmented as torchvision does it, each sample once in an order of a seed; their loaders."""

import pickle
from itertools import chain

import pytest
import torch
from helpers.data import Own, set_up, vectors
from helpers.map_style import Noisy
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from torchvision.transforms.functional import to_tensor
from torchvision.transforms.v2 import functional

from fedmoe_pl.data import Arrays, Batches, ClientSamples, Digits, FromDatasets, RandomCrop, RandomHorizontalFlip


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


# Loaders, which are PyTorch's, so that what Lightning does with loaders works


from_lightning = pytest.mark.filterwarnings("ignore")  # of workers and shuffling that it turns off


class Seen(LightningModule):
    """Notes the batches of each epoch."""

    def __init__(self):
        super().__init__()
        self.weight, self.epochs = nn.Parameter(torch.zeros(())), []

    def on_train_epoch_start(self):
        self.epochs.append([])

    def training_step(self, batch, batch_idx):
        self.epochs[-1].append(batch[0].flatten().tolist())
        return self.weight * 1

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def seen(data, **trainer):
    module, quiet = Seen(), dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    Trainer(max_epochs=2, accelerator="cpu", enable_model_summary=False, **quiet, **trainer).fit(module, data)
    return module.epochs


def in_memory():
    return Own(vectors(50), num_clients=2, batch_size=8)


def of_datasets():
    dataset = TensorDataset(torch.arange(50.0), torch.arange(50) % 2)
    return FromDatasets(dataset, dataset, num_clients=2, batch_size=8)


@from_lightning
@pytest.mark.parametrize("made", [in_memory, of_datasets])
def test_overfitting_repeats_the_same_batches_in_every_epoch(made):
    (first, second), (whole, other) = seen(made(), overfit_batches=3), seen(made())
    assert len(first) == 3 and first == second
    assert len(whole) == 7 and whole != other
    assert sorted(chain(*whole)) == sorted(chain(*other))


@pytest.mark.parametrize("made", [in_memory, of_datasets])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.few(1)
def test_any_sampler_and_workers_can_take_the_place_of_the_loader_s(made, workers):
    data = set_up(made())
    loader = data.train_dataloader()
    assert isinstance(loader, DataLoader) and len(loader.dataset) == 50 and len(loader) == 7
    parts = [DistributedSampler(loader.dataset, 2, rank, shuffle=False) for rank in (0, 1)]
    arguments = {"batch_size": 8, "collate_fn": loader.collate_fn, "num_workers": workers}
    of_ranks = [[*type(loader)(loader.dataset, sampler=part, **arguments)] for part in parts]
    for rank, batches in enumerate(of_ranks):
        expected = [loader.dataset[index] for index in range(rank, 50, 2)]
        assert [len(y) for _, y in batches] == [8, 8, 8, 1]
        assert torch.equal(torch.cat([x for x, _ in batches]), torch.stack([x for x, _ in expected]))
        assert torch.cat([y for _, y in batches]).tolist() == [int(y) for _, y in expected]


def test_an_epoch_has_the_batches_of_the_data_module_itself():
    data = set_up(Digits(num_clients=2, augmentation=[RandomCrop(1)], validation_fraction=0.2))
    torch.manual_seed(1)
    found = [[*data.train_dataloader()], [*data.val_dataloader()], [*data.test_dataloader()]]
    torch.manual_seed(1)
    of_training = data.batches(data.train_samples.indices, generator=torch.default_generator, augment=True)
    expected = [of_training, data.batches(data.validation_samples.indices), data.batches(data.global_test)]
    for batches, others in zip(found, expected, strict=True):
        for (x, y), (same, labels) in zip(batches, others, strict=True):
            assert torch.equal(x, same) and torch.equal(y, labels)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.few(1)
def test_random_transforms_of_a_dataset_differ_in_every_epoch_and_not_in_evaluation(workers):
    data = set_up(FromDatasets(Noisy(12), Noisy(4), num_clients=1, batch_size=5, num_workers=workers))
    train, test = (
        [torch.cat([x for x, _ in loader]) for _ in range(2)]
        for loader in (data.train_dataloader(), data.test_dataloader())
    )
    assert len(torch.cat(train).unique(dim=0)) == 24
    assert torch.equal(*test)


@from_lightning
@pytest.mark.slow
def test_several_processes_divide_the_samples():
    module = Sum()
    trainer = Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp_fork", logger=False, enable_checkpointing=False
    )
    trainer.fit(module, in_memory())
    assert trainer.callback_metrics["sum"] == sum(range(50)), "each sample once"


class Sum(Seen):
    """Logs the sum over all processes of their samples."""

    def training_step(self, batch, batch_idx):
        self.log("sum", batch[0].sum(), on_step=False, on_epoch=True, reduce_fx="sum", sync_dist=True)
        return self.weight * 1
