"""Batches of some samples, and those of samples in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor

EVALUATED_AT_ONCE = 1000
"""Samples in a batch for evaluation."""
_SAMPLES_AT_ONCE = 128  # samples gathered and augmented in one call: cheaper than batch by batch, and fits the cache


@dataclass(frozen=True)
class Share:
    """A process's part of every batch, where several processes train one client.

    Args:
        rank: the process's number.
        processes: how many there are.
        at_least: samples that each part has. A batch with too few of them for that has fewer parts, and the other
            processes get some that count for nothing.

    Example:
        >>> batch = torch.arange(5)
        >>> [(batch[Share(rank, 2).part(5)].tolist(), Share(rank, 2).weight(5)) for rank in (0, 1)]
        [([0, 1], 0.8), ([2, 3, 4], 1.2)]
    """

    rank: int
    processes: int
    at_least: int = 1

    def _parts(self, size: int) -> int:
        return min(self.processes, max(size // self.at_least, 1))

    def part(self, size: int) -> slice:
        """Which of the samples of a batch of some size are the process's own."""
        parts = self._parts(size)
        number = self.rank % parts
        return slice(size * number // parts, size * (number + 1) // parts)

    def weight(self, size: int) -> float:
        """What the mean over the part counts in a mean over all processes that is to be the one over the batch."""
        part = self.part(size)
        return (part.stop - part.start) * self.processes / size if self.rank < self._parts(size) else 0.0


class SampleBatches(ABC):
    """An iterable of the batches of some samples; each iteration is one epoch.

    Args:
        samples: indices of the samples to iterate over.
        batch_size: samples per batch; the last batch may be shorter.
        shuffle: whether every epoch has a new random order.
        generator: source of randomness; None for PyTorch's global one.
        drop_single: whether a last batch of one sample is left out, if it is not the only batch.
        device: the device of the batches.

    Attributes:
        length: number of samples of an epoch.
        share: this process's part of each batch, the only one that the iterable yields; None for whole batches.
    """

    share: Share | None = None

    def __init__(
        self,
        samples: Tensor,
        batch_size: int,
        shuffle: bool,
        generator: Generator | None,
        drop_single: bool,
        device: torch.device,
    ) -> None:
        self.samples = samples
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.generator = generator
        self.device = device
        dropped = drop_single and len(samples) > 1 and len(samples) % batch_size == 1
        self.length = len(samples) - dropped

    def __len__(self) -> int:
        """Returns the number of batches of an epoch."""
        return -(-self.length // self.batch_size)

    def size(self, index: int) -> int:
        """Number of samples of a batch, given its place in an epoch; of the whole batch, if there is a share."""
        return min(self.batch_size, self.length - index * self.batch_size)

    def order(self) -> Tensor:
        """Draws the order of an epoch: positions in ``samples``, shape (n,)."""
        if not self.shuffle:
            return torch.arange(self.length)
        device = self.generator.device if self.generator else None
        return torch.randperm(len(self.samples), generator=self.generator, device=device)[: self.length]

    def places(self) -> Iterable[Tensor]:
        """Draws the batches of an epoch: positions in ``samples``, each of shape (b,)."""
        return self.order().split(self.batch_size)

    @abstractmethod
    def __iter__(self) -> Iterator[Any]:
        """Iterates over one epoch."""


class Batches(SampleBatches):
    """Batches of samples in memory: tuples of samples, shape (b, ...), and targets, shape (b, ...).

    Args:
        x: samples of the whole data set.
        y: their targets, such as classes.
        samples, batch_size, shuffle, generator, drop_single: see :class:`SampleBatches`.
        augment: changes samples at random, called with some samples and ``generator``; None for no change.
        device: the device of the batches; None for that of ``x``.

    Example:
        >>> batches = Batches(torch.arange(6.0), torch.arange(6), torch.tensor([5, 1, 2]), batch_size=2)
        >>> [y.tolist() for x, y in batches]
        [[5, 1], [2]]
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        samples: Tensor,
        batch_size: int,
        shuffle: bool = False,
        generator: Generator | None = None,
        augment: Callable[[Tensor, Generator | None], Tensor] | None = None,
        drop_single: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__(samples, batch_size, shuffle, generator, drop_single, x.device if device is None else device)
        self.x = x
        self.y = y
        self.augment = augment

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterates over one epoch."""
        samples = self.samples[self.order().to(self.samples.device)]
        at_once = max(_SAMPLES_AT_ONCE // self.batch_size, 1) * self.batch_size
        for start in range(0, len(samples), at_once):
            indices = samples[start : start + at_once]
            x = self.x.index_select(0, indices.to(self.x.device)).to(self.device)
            y = self.y.index_select(0, indices.to(self.y.device)).to(self.device)
            if self.augment is not None:
                x = self.augment(x, self.generator)
            pairs = zip(x.split(self.batch_size), y.split(self.batch_size), strict=True)
            if self.share is not None:
                pairs = ((x[part], y[part]) for x, y in pairs for part in [self.share.part(len(y))])
            yield from pairs


class PoissonBatches(Batches):
    """Batches that each sample joins with the same probability, by a draw of its own; some may be empty.

    This is Poisson sampling, on which the accounting of DP-SGD rests. Batches have ``batch_size`` samples on average,
    and an epoch has as many as it takes on average to draw every sample once.
    """

    @classmethod
    def of(cls, batches: Batches) -> PoissonBatches:
        """The same samples, drawn into batches of the same size on average."""
        arguments = (batches.x, batches.y, batches.samples, batches.batch_size, True, batches.generator)
        return cls(*arguments, batches.augment, device=batches.device)

    @property
    def probability(self) -> float:
        """With which a sample joins a batch."""
        return poisson_sampling(len(self.samples), self.batch_size)[0]

    def __len__(self) -> int:
        """Returns the number of batches of an epoch."""
        return poisson_sampling(len(self.samples), self.batch_size)[1]

    def places(self) -> Iterator[Tensor]:
        """Draws the batches of an epoch: positions in ``samples``, each of shape (b,)."""
        for _ in range(len(self)):
            draws = torch.rand(len(self.samples), generator=self.generator, dtype=torch.float64)
            yield (draws < self.probability).nonzero().flatten()

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterates over one epoch."""
        for places in self.places():
            indices = self.samples[places]
            x = self.x.index_select(0, indices.to(self.x.device)).to(self.device)
            if self.augment is not None and len(x):
                x = self.augment(x, self.generator)
            yield x, self.y.index_select(0, indices.to(self.y.device)).to(self.device)


def poisson_sampling(samples: int, batch_size: int) -> tuple[float, int]:
    """The probability with which each of some samples joins a batch, and the number of batches of an epoch.

    Example:
        >>> poisson_sampling(100, 8), poisson_sampling(5, 8), poisson_sampling(0, 8)
        ((0.08, 12), (1.0, 1), (0.0, 0))
    """
    return (min(batch_size / samples, 1.0), max(round(samples / batch_size), 1)) if samples else (0.0, 0)
