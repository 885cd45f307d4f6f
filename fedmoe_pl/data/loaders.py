"""PyTorch's loaders of a data module's samples, for a plain Trainer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor
from torch.utils.data import DataLoader, Dataset, RandomSampler, SequentialSampler

from fedmoe_pl.data.map_style import MOST_SEED, begin_worker, unchanged

DataModule = Any  # a FederatedDataModule, whose module imports this one


class LoadedSamples(Dataset):
    """Some samples of a data module, which a loader reads a batch at a time."""

    def __init__(self, datamodule: DataModule, samples: Tensor, training: bool) -> None:
        self.datamodule, self.samples, self.training = datamodule, samples, training

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, position: int) -> Any:
        """A sample by itself, not augmented: a pair of tensors, or as its dataset has it."""
        index, reader = int(self.samples[position]), self.datamodule.reader
        if reader is None:
            return self.datamodule.x[index], self.datamodule.y[index]
        return (reader.training if self.training else reader.evaluation).dataset.samples([index])[0]

    def __getitems__(self, positions: Sequence[int]) -> Any:
        """A whole batch, as the data module makes it."""
        indices, reader = self.samples[torch.as_tensor(positions)], self.datamodule.reader
        if reader is None:
            return next(iter(self.datamodule.batches(indices, len(indices), augment=self.training)))
        if self.training:
            return reader.training[indices.tolist(), int(torch.randint(MOST_SEED, ()))]
        return reader.evaluation[indices.tolist(), 0]  # the same transforms in every epoch


class Shuffled(RandomSampler):
    """A new order in every epoch, for which PyTorch's own draws a second one that nobody needs."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self.data_source)).tolist())  # pyright: ignore[reportArgumentType]


class Loader(DataLoader):
    """A ``DataLoader`` that gathers samples in memory many at a time, in the order of whatever sampler it has."""

    def __iter__(self) -> Any:
        dataset: Any = self.dataset
        data = dataset.datamodule
        if data.reader is not None or self.num_workers or self.batch_size is None:  # Lightning's, in predictions
            return super().__iter__()
        samples = dataset.samples[torch.tensor([*self.sampler], dtype=torch.int64)]
        return iter(data.batches(samples, self.batch_size, augment=dataset.training))


def loader(datamodule: DataModule, samples: Tensor, training: bool = False) -> Loader:
    """Batches of some samples; for training, shuffled in every epoch by PyTorch's global generator, and augmented."""
    dataset, data = LoadedSamples(datamodule, samples, training), datamodule.reader and datamodule.reader.data
    workers = data.num_workers if data else 0
    return Loader(
        dataset,
        batch_size=datamodule.batch_size,
        sampler=Shuffled(dataset) if training else SequentialSampler(dataset),
        collate_fn=unchanged,
        num_workers=workers,
        worker_init_fn=partial(begin_worker, data.worker_init_fn) if data else None,
        generator=None if workers else Generator(),  # or the global one would draw a seed for workers
    )
