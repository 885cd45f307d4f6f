"""A data set whose samples are read one by one, from map-style datasets of PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate

from fedmoe_pl.data.arrays import are_classes, label_problems
from fedmoe_pl.seeds import seeded


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
        name: the data's name in messages.
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
    name: str = "MapStyleData"

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of training and test samples."""
        return len(self.train_dataset), 0 if self.test_dataset is None else len(self.test_dataset)

    @property
    def targets(self) -> Tensor:
        """Classes of all samples as int64, the training samples first; shape (n, 0) if the targets are no classes."""
        return torch.empty(sum(self.sizes), 0) if self.classes is None else self.classes.long()

    def check_datasets(self, needs_test: bool = True) -> None:
        """Refuses datasets that are no map-style datasets, or of wrong sizes; arguments as in ``check``."""
        for problem in self._dataset_problems(needs_test):
            raise MisconfigurationException(f"{self.name}: {problem}.")

    def check(self, needs_test: bool = True) -> None:
        """Refuses datasets and values of their samples that do not fit together.

        Args:
            needs_test: whether there must be test samples.

        Raises:
            MisconfigurationException: if there is a problem; the message describes the first one.
        """
        self.check_datasets(needs_test)
        for problem in self._value_problems():
            raise MisconfigurationException(f"{self.name}: {problem}.")

    def _dataset_problems(self, needs_test: bool) -> Iterator[str]:
        for argument in ("train_dataset", "test_dataset", "eval_dataset"):
            dataset = getattr(self, argument)
            if dataset is not None and not is_map_style(dataset):
                yield (
                    f"{argument} is a {type(dataset).__name__}, but must be a map-style dataset, with __len__ and "
                    "__getitem__, so that each sample can belong to a client"
                )
        n_train, n_test = self.sizes
        if not n_train:
            yield "train_dataset is empty, but must have at least one sample"
        if needs_test and not n_test:
            yield (
                f"test_dataset is {'None' if self.test_dataset is None else 'empty'}, but must have the samples of the "
                "global test set, or pool must be True, so that these are the samples that clients hold out"
            )
        if self.eval_dataset is not None and len(self.eval_dataset) != n_train:
            yield (
                f"eval_dataset is of {len(self.eval_dataset)} samples, but must have the {n_train} samples of "
                "train_dataset in the same order"
            )

    def _value_problems(self) -> Iterator[str]:
        (n_train, n_test), n = self.sizes, sum(self.sizes)
        if self.classes is not None:
            if self.classes.shape != (n,) or not are_classes(self.classes):
                yield (
                    f"targets has {self.classes.dtype} values of shape {tuple(self.classes.shape)}, but must have one "
                    f"integer from 0 for each of the {n} samples"
                )
            yield from label_problems("targets", self.classes, n)
        if self.client_test is not None and self.client_train is None:
            yield "client_train is None, but must be given where client_test is"
        for part, number in (("train", n_train), ("test", n_test)):
            ids = getattr(self, f"client_{part}")
            if ids is not None and ids.shape != (number,):
                yield (
                    f"groups has ids of shape {ids.shape}, but must have one for each of the {number} {part} samples"
                )


def is_map_style(dataset: Any) -> bool:
    """Whether samples can be read by their index."""
    return isinstance(dataset, Sized) and hasattr(dataset, "__getitem__") and not isinstance(dataset, IterableDataset)


class BatchReader:
    """Reads batches of a data set; as a map-style dataset itself, its items are whole batches.

    Each batch has a seed of its own, from which the global random generators start when its samples are read and
    collated. Random transforms therefore do not depend on the process that reads them.

    Args:
        data: the data set.
        training: whether the batches are for training, and not for evaluation.
    """

    def __init__(self, data: MapStyleData, training: bool) -> None:
        evaluated = data.train_dataset if data.eval_dataset is None else data.eval_dataset
        self.first = data.train_dataset if training else evaluated
        self.second = data.test_dataset
        self.collate_fn = data.collate_fn if training else data.eval_collate_fn or data.collate_fn
        self.num_train = len(data.train_dataset)

    def __getitem__(self, request: tuple[Sequence[int], int]) -> Any:
        """Returns the batch of some samples, given their indices and the seed."""
        indices, seed = request
        with seeded(seed):
            return self.collate_fn(self._samples(indices))

    def _samples(self, indices: Sequence[int]) -> list[Any]:
        n = self.num_train
        read_many = getattr(self.first, "__getitems__", None)
        if read_many is not None and max(indices) < n:
            return read_many(list(indices))
        return [self.first[index] if index < n else self._of_second(index - n) for index in indices]

    def _of_second(self, index: int) -> Any:
        assert self.second is not None
        return self.second[index]
