"""The loaders of a data module in a plain Trainer are PyTorch's, so that what Lightning does with loaders works."""

from itertools import chain

import pytest
import torch
from helpers.data import Own, set_up, vectors
from helpers.map_style import Noisy
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from fedmoe_pl.data import Digits, FromDatasets, RandomCrop

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, of workers and shuffling that it turns off


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
