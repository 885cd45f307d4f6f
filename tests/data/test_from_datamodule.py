"""What a LightningDataModule's setup and loaders say is done, or refused."""

import multiprocessing
from typing import Any

import numpy as np
import pytest
import torch
from helpers.data import refused_argument, set_up
from helpers.map_style import DictData, Dicts, Noisy, padded
from lightning.pytorch import LightningDataModule
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import FromDataModule


class Split(DictData):
    def setup(self, stage):
        super().setup(stage)
        if stage == "fit":
            self.training, self.rest = random_split(Dicts(22), [12, 10])


class SplitByLoader(DictData):
    def train_dataloader(self):
        self.training, _ = random_split(Dicts(22), [12, 10])
        return super().train_dataloader()


@pytest.mark.parametrize("kind", [Split, SplitByLoader])
def test_what_a_data_module_draws_depends_on_the_partition_seed_alone(kind):
    drawn = []
    for seed, partition_seed in ((0, 0), (1, 0), (1, 1)):
        torch.manual_seed(seed)
        state = torch.get_rng_state()
        module = kind()
        set_up(FromDataModule(module, targets="label", num_clients=2, partition_seed=partition_seed))
        assert torch.equal(torch.get_rng_state(), state)
        drawn.append([*module.training.indices])
    assert drawn[0] == drawn[1] != drawn[2]


class Redrawn(LightningDataModule):
    """Splits its samples again in each setup, whatever the stage, by a generator of its own."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def setup(self, stage):
        self.training, self.testing = random_split(Noisy(22), [15, 7], self.generator)

    def train_dataloader(self):
        return DataLoader(self.training)

    def test_dataloader(self):
        return DataLoader(self.testing)


def test_training_and_test_samples_are_of_the_same_split():
    data = set_up(FromDataModule(Redrawn(), eval_dataset="training", num_clients=2))
    assert data.reader is not None
    of_data = data.reader.data
    assert of_data.test_dataset is not None and of_data.eval_dataset is of_data.train_dataset
    assert sorted([*of_data.train_dataset.indices, *of_data.test_dataset.indices]) == [*range(22)]


class RedrawnInMemory(Redrawn):
    """The same by NumPy, with tensors in memory."""

    def __init__(self):
        super().__init__()
        self.rng = np.random.default_rng(0)

    def setup(self, stage):
        x = torch.from_numpy(self.rng.permutation(22)).float()
        self.training, self.testing = (TensorDataset(part[:, None], part.long() % 3) for part in (x[:15], x[15:]))


def test_training_and_test_samples_in_memory_are_of_the_same_split():
    data = set_up(FromDataModule(RedrawnInMemory(), num_clients=2))
    assert data.num_shared == 15 and data.x.flatten().sort().values.tolist() == [*range(22)]


class OneAttribute(LightningDataModule):
    """Its setup puts the samples of each stage into the same attribute."""

    def setup(self, stage):
        self.samples = Noisy(15 if stage == "fit" else 7)

    def train_dataloader(self):
        return DataLoader(self.samples)

    test_dataloader = train_dataloader


class Wrapped(OneAttribute):
    def train_dataloader(self):
        return DataLoader(Subset(self.samples, range(5)))


class Removed(OneAttribute):
    """Its samples for training are gone where it is tested."""

    def setup(self, stage):
        super().setup(stage)
        self.training = self.samples if stage == "fit" else None

    def train_dataloader(self):
        return DataLoader(self.training)


@pytest.mark.parametrize(("kind", "number"), [(OneAttribute, 15), (Wrapped, 5), (Removed, 15)])
def test_training_samples_are_those_after_setup_for_fit(kind, number):
    data = set_up(FromDataModule(kind(), num_clients=2))
    assert data.reader is not None
    assert (len(data.reader.data.train_dataset), len(data.reader.data.test_dataset)) == (number, 7)
    assert len(data.reader.data.train_dataset[0]) == 2


class SameInMemory(OneAttribute):
    """All its test samples are also for training."""

    def setup(self, stage):
        x = torch.arange(15.0 if stage == "fit" else 7.0)
        self.samples = TensorDataset(x[:, None], x.long() % 3)


def test_training_samples_that_are_test_samples_too_are_no_other_split():
    data = set_up(FromDataModule(SameInMemory(), num_clients=2))
    assert data.x[: data.num_shared].flatten().tolist() == [*range(15)] and len(data.global_test) == 7


def test_each_process_that_reads_samples_is_begun_by_the_loader_s_function():
    begun = multiprocessing.Queue()

    class Begun(DictData):
        def train_dataloader(self):
            return DataLoader(self.training, collate_fn=padded, num_workers=1, worker_init_fn=begun.put)

    data = set_up(FromDataModule(Begun(), targets="label", num_clients=2))
    assert len([*data.batches(data.train_samples[0])]) == 11
    assert begun.get(timeout=60) == 0


SEVEN = SequentialSampler(range(7))


@pytest.mark.parametrize(
    ("sampling", "is_all"),
    [
        (lambda data: {"sampler": RandomSampler(data)}, True),
        (lambda data: {"sampler": RandomSampler(data, replacement=True)}, False),
        (lambda data: {"sampler": RandomSampler(data, num_samples=7)}, False),
        (lambda data: {"sampler": RandomSampler(range(7))}, False),
        (lambda data: {"sampler": WeightedRandomSampler([1.0] * 22, 22)}, False),
        (lambda data: {"sampler": SEVEN}, False),
        (lambda data: {"batch_sampler": BatchSampler(SEVEN, 2, drop_last=True)}, False),
    ],
)
def test_a_sampler_that_does_not_draw_each_sample_once_in_training_is_refused(sampling, is_all):
    module = DictData()
    module.train_dataloader = lambda: DataLoader(Dicts(22), collate_fn=padded, **sampling(Dicts(22)))
    data = FromDataModule(module, targets="label", num_clients=2)
    if is_all:
        assert set_up(data).num_clients == 2
    else:
        assert refused_argument(lambda: data) == "datamodule"


@pytest.mark.parametrize(
    ("name", "make", "what"),
    [
        ("test_dataloader", lambda loader: [loader, loader], "DataLoader, DataLoader"),
        ("val_dataloader", lambda loader: [], "none"),
        ("train_dataloader", lambda loader: {"a": loader}, "dict"),
        ("train_dataloader", lambda loader: None, "None"),
    ],
)
def test_loaders_that_are_not_one_are_refused(name, make, what):
    module, loader = LightningDataModule(), DataLoader(Noisy(5))
    module.train_dataloader = lambda: [loader]
    setattr(module, name, lambda: make(loader))
    with pytest.raises(InvalidArgumentError, match=f"one whose {name} gives one DataLoader, because it gives {what}."):
        FromDataModule(module, num_clients=2).setup()


class ByLength(Sampler):
    def __iter__(self):
        return iter([[4, 1], [0, 2, 3]])


@pytest.mark.parametrize("name", ["test_dataloader", "val_dataloader"])
def test_a_loader_for_evaluation_has_each_sample_once_in_any_order(name):
    class Data(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Noisy(22), shuffle=True)

    samplers: list[tuple[bool, dict[str, Any]]] = [
        (True, {"sampler": SubsetRandomSampler([4, 2, 0, 3, 1])}),
        (True, {"batch_sampler": ByLength()}),
        (True, {"shuffle": True, "batch_size": 2, "drop_last": True}),
        (False, {"sampler": SubsetRandomSampler([2, 0])}),
        (False, {"sampler": WeightedRandomSampler([1.0, 1.0, 1.0, 1.0, 1.0], 5)}),
        (False, {"batch_sampler": BatchSampler(SequentialSampler(range(4)), 2, drop_last=False)}),
    ]
    for has_all, arguments in samplers:
        module, state = Data(), torch.get_rng_state()
        setattr(module, name, lambda arguments=arguments: DataLoader(Noisy(5), **arguments))
        data = FromDataModule(module, num_clients=2)
        if has_all:
            assert len(set_up(data).global_test) == 5 and torch.equal(torch.get_rng_state(), state)
        else:
            with pytest.raises(InvalidArgumentError, match=rf"one whose {name} has .* a torch.utils.data.Subset can"):
                data.setup()


def test_a_batch_sampler_says_the_batch_size():
    class Data(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Noisy(22), batch_sampler=BatchSampler(RandomSampler(range(22)), 7, drop_last=False))

        def test_dataloader(self):
            return DataLoader(Noisy(5))

    assert set_up(FromDataModule(Data(), num_clients=2)).batch_size == 7
