"""A data set whose samples are read one by one, from map-style datasets of PyTorch, and its batches."""

from __future__ import annotations

import signal
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import finalize

import numpy as np
import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from torch import Generator, Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, default_collate

from fedmoe_pl.checks import InvalidArgumentError, reason_of, tried
from fedmoe_pl.data.arrays import are_classes, check_labels, is_missing
from fedmoe_pl.data.batches import EVALUATED_AT_ONCE, SampleBatches
from fedmoe_pl.seeds import seeded
from fedmoe_pl.trees import bits_of

MOST_SEED = 2**62
"""Seeds of batches are below it."""
_TRIED = 2  # samples of the batches that are tried
_MOST_COMPARED = 20  # samples whose targets are compared with their classes
_MOST_CHECKED = 16  # samples whose values are compared when a run is continued
_MOST_BYTES = 2**26  # of a batch for evaluation
WITHOUT_TEST = "with pool=True and a test_fraction, so that clients are tested on samples that they hold out"
"""How to do without a test set, as the end of a sentence."""


def difference_of_numbers(numbers: Mapping[str, int], others: Mapping[str, int]) -> str:
    """How two datasets number a class differently, or two classes alike: "'b' is 0, not 1"; empty if they do not."""
    names = {number: name for name, number in others.items() if name not in numbers}
    for name, number in numbers.items():
        if others.get(name, number) != number:
            return f"'{name}' is {number}, not {others[name]}"
        if name not in others and number in names:
            return f"'{name}' and '{names[number]}' are both {number}"
    return ""


@dataclass
class MapStyleData:
    """A data set whose samples are read one by one, in place of :class:`Arrays`.

    A dataset is any object with ``__len__`` and ``__getitem__``; its samples and their transforms are its own affair.

    Attributes:
        train_dataset: the training samples.
        test_dataset: the samples of the global test set; None only if the data module pools all samples.
        eval_dataset: the training samples in the same order, as they are read for evaluation, without random
            transforms; None for ``train_dataset``.
        classes: the class of each sample, the training samples first, shape (n,), integers from 0; None if the targets
            are no classes.
        target_key: the key of the targets in batches that are dicts; None if they are not dicts.
        client_train: the client that each training sample comes from, shape (n,), any sortable type; None if unknown.
        client_test: the same for the test samples.
        collate_fn: makes a batch of a list of samples.
        eval_collate_fn: the same for evaluation; None for ``collate_fn``.
        num_workers: number of processes that read samples; 0 for none.
        worker_init_fn: called in each of these processes with its number; None for none.
        class_numbers: the number of each class by its name, as far as the datasets name them.
    """

    train_dataset: Any
    test_dataset: Any | None = None
    eval_dataset: Any | None = None
    classes: Tensor | None = None
    target_key: str | None = None
    client_train: np.ndarray | None = None
    client_test: np.ndarray | None = None
    collate_fn: Callable[[list[Any]], Any] = default_collate
    eval_collate_fn: Callable[[list[Any]], Any] | None = None
    num_workers: int = 0
    worker_init_fn: Callable[[int], None] | None = None
    class_numbers: Mapping[str, int] = field(default_factory=dict)

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of training and test samples."""
        return len(self.train_dataset), 0 if self.test_dataset is None else len(self.test_dataset)

    @property
    def targets(self) -> Tensor:
        """Classes of all samples as int64, the training samples first; shape (n, 0) if the targets are no classes."""
        return torch.empty(sum(self.sizes), 0) if self.classes is None else self.classes.long()

    def check(self, owner: object, needs_test: bool) -> None:
        """Refuses datasets and values of their samples that do not fit together, by the name of the data module."""
        (n_train, n_test), n = self.sizes, sum(self.sizes)
        if needs_test and not n_test:
            allowed = f"a dataset of at least one sample, or left out {WITHOUT_TEST}"
            raise InvalidArgumentError(owner, "test_dataset", self.test_dataset, allowed)
        if self.eval_dataset is not None and len(self.eval_dataset) != n_train:
            allowed = f"the {n_train} samples of train_dataset in the same order"
            reason = f"it has {len(self.eval_dataset)}"
            raise InvalidArgumentError(owner, "eval_dataset", self.eval_dataset, allowed, reason)
        if self.classes is not None:
            if self.classes.shape != (n,) or not are_classes(self.classes):
                raise InvalidArgumentError(
                    owner, "targets", self.classes, f"one integer from 0 for each of {n} samples"
                )
            check_labels(owner, "targets", self.classes, n)
        for part, ids, number in (("train", self.client_train, n_train), ("test", self.client_test, n_test)):
            if ids is not None:
                check_groups(owner, ids, ids, part, number)


def check_groups(owner: object, groups: object, ids: np.ndarray, part: str, number: int) -> None:
    """Refuses ids, which ``groups`` gives, unless each of the samples of a part has one."""
    allowed = "a group of each sample"
    if ids.shape != (number,):
        raise InvalidArgumentError(owner, "groups", groups, allowed, f"it has shape {ids.shape}")
    if missing := next(((index, each) for index, each in enumerate(ids) if is_missing(each)), None):
        reason = f"sample {missing[0]} of {part}_dataset has {missing[1]}"
        raise InvalidArgumentError(owner, "groups", groups, allowed, reason)


def is_pair(batch: Any) -> bool:
    """Whether a batch is a pair of samples and their targets."""
    return isinstance(batch, (tuple, list)) and len(batch) == 2


def batch_length(batch: Any) -> int:
    """Number of samples of a batch: of the targets of a pair, or of the first tensor of another batch."""
    if is_pair(batch) and isinstance(batch[1], Tensor):
        return len(batch[1])
    return next((len(tensor) for tensor in tensors_of(batch) if tensor.dim()), 1)


def leaves_of(batch: Any) -> list[Any]:
    """All values in a batch, also of a dict of another class, such as transformers' ``BatchEncoding``."""
    return tree_leaves(dict(batch) if isinstance(batch, Mapping) else batch)


def tensors_of(batch: Any) -> list[Tensor]:
    """All tensors in a batch."""
    return [leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor)]


class _BatchDataset:
    """A map-style dataset whose items are whole batches for training or for evaluation.

    Each batch has a seed of its own, from which the global random generators start when its samples are read and
    collated, so that random transforms do not depend on the process that reads them.
    """

    def __init__(self, data: MapStyleData, training: bool) -> None:
        is_same = training or data.eval_dataset is None
        self.data = data
        self.first: Any = data.train_dataset if is_same else data.eval_dataset
        self.second: Any = data.test_dataset
        self.collate_fn = data.collate_fn if training else data.eval_collate_fn or data.collate_fn

    def __getitem__(self, request: tuple[Sequence[int], int]) -> Any:
        """Returns the batch of some samples, given their indices and the seed."""
        indices, seed = request
        with seeded(seed):
            return self.collate_fn(self.samples(indices))

    def samples(self, indices: Sequence[int]) -> list[Any]:
        """Some samples as the dataset has them."""
        n = len(self.data.train_dataset)
        read_many = getattr(self.first, "__getitems__", None)
        if read_many is not None and max(indices) < n:
            return read_many(list(indices))
        return [_sample(self.first, index) if index < n else _sample(self.second, index - n) for index in indices]


def _sample(dataset: Any, index: int) -> Any:
    try:
        return dataset[index]
    except Exception as error:  # such as a damaged image, of which the library does not say which one it is
        raise RuntimeError(f"sample {index} of {type(dataset).__name__}: {reason_of(error)}.") from error


class _Reader:
    """Reads the batches of a dataset, in this process or in workers that stay until it is freed."""

    def __init__(self, dataset: _BatchDataset) -> None:
        self.dataset = dataset
        self._loaders: list[DataLoader] = []  # none, or one
        self._requests: list[tuple[list[int], int]] = []  # the loader's sampler: what it reads in its next iteration
        self._is_busy = False

    def __getitem__(self, request: tuple[Sequence[int], int]) -> Any:
        """Reads a batch in this process."""
        return self.dataset[request]

    def read(self, requests: list[tuple[list[int], int]]) -> Iterator[Any]:
        """Reads batches, each given the indices of its samples and its seed."""
        if not self.dataset.data.num_workers or self._is_busy:  # workers cannot be in two iterations at once
            yield from map(self.__getitem__, requests)
            return
        if not self._loaders:
            self._loaders.append(self._new_loader())
            # if it were freed in a cycle of references, shutting it down would wait five seconds per worker
            finalize(self, self._loaders.clear).atexit = False
        self._is_busy, self._requests[:] = True, requests
        try:
            yield from self._loaders[0]
        finally:
            self._is_busy = False

    def _new_loader(self) -> DataLoader:
        data = self.dataset.data
        return DataLoader(
            self.dataset,  # pyright: ignore[reportArgumentType]
            batch_size=None,
            sampler=self._requests,
            num_workers=data.num_workers,
            collate_fn=unchanged,
            persistent_workers=True,
            worker_init_fn=partial(begin_worker, data.worker_init_fn),
            generator=Generator(),  # the seed that it draws for its workers must not change anybody's numbers
        )

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out worker processes, which another process cannot use."""
        return {**vars(self), "_loaders": [], "_requests": [], "_is_busy": False}


class SampleReader:
    """Reads the batches of a data set.

    Attributes:
        has_pairs: whether batches are pairs of samples and their targets; otherwise they are whatever the collate
            function makes, such as dicts.
        has_targets: whether batches tell the targets of their samples.
        evaluated_at_once: samples in a batch for evaluation, at most 1000 of at most 64 MiB.
    """

    def __init__(self, owner: object, data: MapStyleData) -> None:
        self.data = data
        self.training, self.evaluation = (_Reader(_BatchDataset(data, training)) for training in (True, False))
        indices = [*range(min(_TRIED, data.sizes[0]))]
        with tried(f"{type(owner).__name__}: collate_fn makes no batch of the first samples"):
            batch, of_training = self.evaluation[indices, 0], self.training[indices, 0]
        self._check_classes(owner)
        self.has_pairs = is_pair(of_training)
        self.has_targets = isinstance(self.targets_of(batch), Tensor)
        size = sum(tensor.nbytes for tensor in tensors_of(batch)) // _TRIED
        self.evaluated_at_once = min(max(_MOST_BYTES // max(size, 1), 1), EVALUATED_AT_ONCE)

    def targets_of(self, batch: Any) -> Any:
        """The targets in a batch: the second item of a pair, or those under their key in a dict; None for others."""
        if is_pair(batch):
            return batch[1]
        return batch.get(self.data.target_key) if isinstance(batch, Mapping) else None

    def checksums(self, samples: Tensor) -> list[Any]:
        """Checksums of the tensors in batches of a few of the samples, and the other values in them."""
        some = samples[:: max(len(samples) // _MOST_CHECKED, 1)].tolist()
        batches = [self.evaluation[[index], 0] for index in some]
        return [
            zlib.crc32(bits_of(leaf).numpy().data) if isinstance(leaf, Tensor) else repr(leaf)
            for batch in batches
            for leaf in leaves_of(batch)
        ]

    def _check_classes(self, owner: object) -> None:
        """Refuses classes that are not the targets of batches, by a sample of each class."""
        if self.data.classes is None:
            return
        is_test = np.arange(len(self.data.classes)) >= self.data.sizes[0]
        first = np.unique(np.stack([is_test, self.data.classes]), axis=1, return_index=True)[1]
        for index in first[:: -(-len(first) // _MOST_COMPARED)].tolist():
            with tried(f"{type(owner).__name__}: a sample cannot be read"):
                labels, known = self.targets_of(self.evaluation[[index], 0]), self.data.classes[[index]]
            if not isinstance(labels, Tensor) or labels.is_floating_point():
                return
            if not torch.equal(labels, known.to(labels.dtype)):
                name, allowed = f"targets[{index}]", f"{labels.tolist()[0]}, as in the batch of sample {index}"
                raise InvalidArgumentError(owner, name, int(known), allowed)


class DatasetBatches(SampleBatches):
    """Batches as the collate function makes them, of samples that are read one by one.

    If they are read for training, the generator also seeds random transforms; in evaluation, these are the same in
    every epoch.
    """

    def __init__(self, reader: SampleReader, training: bool, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reader = reader
        self.training = training

    def __iter__(self) -> Iterator[Any]:
        """Iterates over one epoch."""
        pieces = self.samples[self.order()].split(self.batch_size) if self.length else ()
        seeds = torch.arange(len(pieces))
        if self.training:
            seeds = torch.randint(MOST_SEED, (len(pieces),), generator=self.generator)
        if self.share is not None:
            pieces = [piece[self.share.part(len(piece))] for piece in pieces]
            seeds += self.share.rank
        requests = [(piece.tolist(), seed) for piece, seed in zip(pieces, seeds.tolist(), strict=True)]
        reader = self.reader.training if self.training else self.reader.evaluation
        for batch in reader.read(requests):
            yield batch if self.device.type == "cpu" else move_data_to_device(batch, self.device)


def begin_worker(worker_init_fn: Callable[[int], None] | None, worker: int) -> None:
    """Leaves Ctrl-C to the process that trains, whose handlers and pipe for signals a forked process inherits."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    if worker_init_fn is not None:
        worker_init_fn(worker)


def unchanged(batch: Any) -> Any:
    """Collates a batch that is one already."""
    return batch
