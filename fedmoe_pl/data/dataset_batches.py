"""Batches whose samples are read one by one."""

from __future__ import annotations

import multiprocessing
import signal
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from fedmoe_pl.data.batches import EVALUATED_AT_ONCE, SampleBatches
from fedmoe_pl.data.map_style import BatchReader, MapStyleData

_MOST = 2**62  # seeds of batches are below it
_TRIED = 2  # samples of the batches that are tried
_MOST_CHECKED = 16  # samples whose values are compared when a run is continued
_MOST_BYTES = 2**26  # of a batch for evaluation


class SampleReader:
    """Reads the batches of a data set, in this process or in worker processes that stay until the program ends.

    Args:
        data: the data set.

    Attributes:
        has_pairs: whether batches are pairs of samples and their targets; otherwise they are whatever the collate
            function makes, such as dicts.
        has_targets: whether batches tell the targets of their samples.
        evaluated_at_once: samples in a batch for evaluation, at most 1000 of at most 64 MiB.
    """

    def __init__(self, data: MapStyleData) -> None:
        self.data = data
        self.readers = {training: BatchReader(data, training) for training in (False, True)}
        self._loaders: dict[bool, _Loader] = {}
        training, evaluation = self._try()
        self.has_pairs = is_pair(training)
        self.has_targets = isinstance(self.targets_of(evaluation), Tensor)
        size = sum(leaf.nbytes for leaf in tree_leaves(evaluation) if isinstance(leaf, Tensor)) // _TRIED
        self.evaluated_at_once = min(max(_MOST_BYTES // max(size, 1), 1), EVALUATED_AT_ONCE)

    def read(self, requests: list[tuple[list[int], int]], training: bool) -> Iterator[Any]:
        """Reads batches.

        Args:
            requests: for each batch, the indices of its samples, and the seed of its random numbers.
            training: whether they are for training, and not for evaluation.
        """
        if self.data.num_workers:
            if training not in self._loaders:
                arguments = self.data.num_workers, self.data.worker_init_fn
                self._loaders[training] = _Loader(self.readers[training], *arguments)
            if not self._loaders[training].is_busy:
                return self._loaders[training].read(requests)
        return map(self.readers[training].__getitem__, requests)

    def targets_of(self, batch: Any) -> Any:
        """The targets in a batch: the second item of a pair, or those under their key in a dict; None for others."""
        if is_pair(batch):
            return batch[1]
        return batch.get(self.data.target_key) if isinstance(batch, Mapping) else None

    def checksums(self) -> list[Any]:
        """Checksums of the tensors in a few batches, and the other values in them."""
        n = sum(self.data.sizes)
        places = range(0, n, max(n // _MOST_CHECKED, 1))
        batches = [self.readers[False][[index], 0] for index in places]
        return [
            zlib.crc32(leaf.contiguous().view(torch.uint8).numpy().data) if isinstance(leaf, Tensor) else repr(leaf)
            for leaf in tree_leaves(batches)
        ]

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out worker processes, which another process cannot use."""
        return {**vars(self), "_loaders": {}}

    def _try(self) -> tuple[Any, Any]:
        """A small batch for training, and one for evaluation.

        Raises:
            MisconfigurationException: if samples cannot be read or collated, or have other classes than they should.
        """
        data, indices = self.data, [*range(min(_TRIED, self.data.sizes[0]))]
        try:
            training, evaluation = (self.readers[training][indices, 0] for training in (True, False))
        except Exception as error:  # whatever a user's dataset raises
            reason = f"{type(error).__name__}: {error}".splitlines()[0].rstrip(".")
            raise MisconfigurationException(
                f"{data.name}: train_dataset is a {type(data.train_dataset).__name__} whose samples must be readable "
                f"and fit collate_fn, but the first ones do not ({reason})."
            ) from error
        labels = self.targets_of(evaluation)
        if data.classes is not None and isinstance(labels, Tensor) and not labels.is_floating_point():
            expected = data.classes[: len(indices)]
            if not torch.equal(labels, expected.to(labels.dtype)):
                raise MisconfigurationException(
                    f"{data.name}: targets gives {expected.tolist()} for the first samples, but must give the targets "
                    f"of their batch, {labels.tolist()}."
                )
        return training, evaluation


def is_pair(batch: Any) -> bool:
    """Whether a batch is a pair of samples and their targets."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def batch_length(batch: Any) -> int:
    """Number of samples of a batch: of the targets of a pair, or of the first tensor of another batch."""
    if is_pair(batch) and isinstance(batch[1], Tensor):
        return len(batch[1])
    return next((len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.dim()), 1)


class DatasetBatches(SampleBatches):
    """Batches as the collate function makes them, of samples that are read one by one.

    Args:
        reader: reads them.
        samples: indices of the samples to iterate over.
        batch_size: samples per batch.
        shuffle: whether every epoch has a new random order.
        generator: source of randomness, also of the transforms; None for PyTorch's global one.
        training: whether samples are read for training, and not for evaluation, whose random transforms are the same
            in every epoch.
        drop_single: whether a last batch of one sample is left out, if it is not the only batch.
        device: the device of the batches; None for the CPU.
    """

    def __init__(
        self,
        reader: SampleReader,
        samples: Tensor,
        batch_size: int,
        shuffle: bool = False,
        generator: Generator | None = None,
        training: bool = False,
        drop_single: bool = False,
        device: torch.device | None = None,
    ) -> None:
        device = torch.device("cpu") if device is None else device
        super().__init__(samples, batch_size, shuffle, generator, drop_single, device)
        self.reader = reader
        self.training = training

    def __iter__(self) -> Iterator[Any]:
        """Iterates over one epoch."""
        pieces = self.samples[self.order()].split(self.batch_size) if self.length else ()
        seeds = torch.arange(len(pieces))
        if self.training:
            seeds = torch.randint(_MOST, (len(pieces),), generator=self.generator)
        requests = [(piece.tolist(), seed) for piece, seed in zip(pieces, seeds.tolist(), strict=True)]
        for batch in self.reader.read(requests, self.training):
            yield batch if self.device.type == "cpu" else move_data_to_device(batch, self.device)


class _Loader:
    """Worker processes that read batches; they start at the first one.

    Args:
        reader: reads a batch.
        num_workers: number of processes.
        worker_init_fn: called in each of them with its number; None for none.

    Attributes:
        is_busy: whether an iteration is under way; there cannot be two.
    """

    def __init__(
        self, reader: BatchReader, num_workers: int, worker_init_fn: Callable[[int], None] | None = None
    ) -> None:
        self.is_busy = False
        self._requests = _Requests()
        self._loader = DataLoader(
            reader,  # pyright: ignore[reportArgumentType]
            batch_size=None,
            sampler=self._requests,
            num_workers=num_workers,
            collate_fn=_unchanged,
            persistent_workers=True,
            # in a worker of the federation, the default is loky's way, which knows no other processes
            multiprocessing_context="fork" if multiprocessing.get_start_method() == "loky" else None,
            worker_init_fn=partial(_begin_worker, worker_init_fn),
            generator=Generator(),  # the seed that it draws for its workers must not change anybody's numbers
        )

    def read(self, requests: list[tuple[list[int], int]]) -> Iterator[Any]:
        """Reads batches, see :meth:`SampleReader.read`."""
        self.is_busy, self._requests.items = True, requests
        try:
            yield from self._loader
        finally:
            self.is_busy = False


class _Requests:
    """The batches to read; a loader asks for them at the beginning of every iteration."""

    def __init__(self) -> None:
        self.items: list[tuple[list[int], int]] = []

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[tuple[list[int], int]]:
        return iter(self.items)


def _begin_worker(worker_init_fn: Callable[[int], None] | None, worker: int) -> None:
    """Leaves Ctrl-C to the process that trains, whose handlers and pipe for signals a forked process inherits."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if worker_init_fn is not None:
        worker_init_fn(worker)


def _unchanged(batch: Any) -> Any:
    return batch
