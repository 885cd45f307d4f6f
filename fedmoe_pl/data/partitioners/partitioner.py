"""The base of all partitioners, the simplest one, and functions for several of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from fedmoe_pl.checks import InvalidArgumentError

_ATTEMPTS = 1000  # before a partitioner gives up
Drawn = TypeVar("Drawn", bound=Sequence[np.ndarray] | np.ndarray)


class Partitioner(ABC):
    """Deals the training samples to the clients; derive from it to write your own partition.

    No sample may be in two of the returned arrays, which is checked. They may depend only on the arguments of the call.

    Attributes:
        needs_classes: whether it looks at the classes of the samples; if not, it also deals data without classes.
    """

    needs_classes: bool = True

    @abstractmethod
    def __call__(
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray] | dict[str, np.ndarray]:
        """Returns the sample indices of every client.

        Args:
            labels: class of every training sample, shape (n,), integers from 0; all 0 for data without classes. A
                partitioner that does not look at them may also get -100, for samples without a label.
            num_clients: number of clients; None if the data determine it.
            rng: the only source of randomness.
            client_ids: the client that every sample comes from, shape (n,); None if unknown.

        Returns:
            One array of indices into ``labels`` per client; in a dict, under the client's name.

        Raises:
            MisconfigurationException: if the samples cannot be dealt as the arguments ask.
        """


class LabelPartitioner(Partitioner):
    """A partitioner that uses only the labels and the number of clients."""

    def __call__(  # noqa: D102
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        if not isinstance(num_clients, int | np.integer) or not 1 <= num_clients <= len(labels):
            allowed = f"an integer from 1 to {len(labels)}, the number of training samples"
            raise InvalidArgumentError(self, "num_clients", num_clients, allowed)
        present = np.unique(labels, return_inverse=True)[1]  # a class number without samples is no class to deal
        return self.partition(present, num_clients, rng)

    @abstractmethod
    def partition(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Returns the sample indices of every client, whose number is from 1 to that of the labels."""


class IID(LabelPartitioner):
    """Shuffles the samples and cuts them into parts whose sizes differ by at most one.

    Example:
        >>> parts = IID()(np.zeros(10, dtype=int), 3, np.random.default_rng(0))
        >>> [len(part) for part in parts]
        [4, 3, 3]
    """

    needs_classes = False

    def partition(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Deals the samples."""
        return np.array_split(rng.permutation(len(labels)), num_clients)


def drawn_until_enough(partitioner: Any, num_clients: int, samples: int, draw: Callable[[], Drawn]) -> Drawn:
    """Draws parts, or numbers of samples by client and class, until each client has ``minimum_samples``."""
    least = partitioner.minimum_samples or 1
    for _ in range(_ATTEMPTS if least * num_clients <= samples else 0):
        drawn = draw()
        sizes = drawn.sum(axis=1) if isinstance(drawn, np.ndarray) else [len(part) for part in drawn]
        if min(sizes) >= least:
            return drawn
    others = ", or alpha higher" if hasattr(partitioner, "alpha") else ""
    reason = f"in {_ATTEMPTS} attempts some of {num_clients} clients had fewer of {samples} samples"
    allowed = f"lower, or num_clients lower{others}"
    raise InvalidArgumentError(partitioner, "minimum_samples", least, allowed, reason)


def check_parts(owner: object, argument: str, given: object, parts: Sequence[np.ndarray], size: int) -> None:
    """Refuses no parts, and those that are not arrays of indices, from 0 to ``size`` - 1, or that have common ones."""
    if not parts:
        raise InvalidArgumentError(owner, argument, given, "at least one array")
    for part in parts:
        if part.ndim != 1 or (len(part) and part.dtype.kind not in "iu"):
            because = f"one of them is {part.dtype} of shape {part.shape}"
            raise InvalidArgumentError(owner, argument, given, "one-dimensional arrays of integers", because)
    together = np.concatenate([part.astype(np.int64, copy=False) for part in parts])
    if len(wrong := together[(together < 0) | (together >= size)]):
        allowed = f"arrays of indices from 0 to {size - 1}"
        raise InvalidArgumentError(owner, argument, given, allowed, f"the index {wrong[0]} occurs")
    if (counts := np.bincount(together, minlength=1)).max() > 1:
        because = f"the index {counts.argmax()} occurs twice"
        raise InvalidArgumentError(owner, argument, given, "arrays without common indices", because)


def group_by(groups: np.ndarray, num_groups: int) -> list[np.ndarray]:
    """The indices of the members of each group, ascending; groups are numbered from 0 and may be empty.

    Example:
        >>> [part.tolist() for part in group_by(np.array([1, 0, 1]), 3)]
        [[1], [0, 2], []]
    """
    ends = np.cumsum(np.bincount(groups, minlength=num_groups))
    order = np.argsort(groups, kind="stable")
    # slices, because np.split takes several times as long for 100,000 clients
    return [order[start:end] for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]


def cut(size: int, shares: np.ndarray) -> np.ndarray:
    """Numbers of samples, whose sum is ``size``, by shares, whose sum is 1: differences of rounded cumulative shares.

    Example:
        >>> cut(10, np.array([0.25, 0.25, 0.5])).tolist()
        [2, 3, 5]
    """
    cuts = np.rint(np.cumsum(shares[:-1]) * size).astype(np.int64)
    return np.diff(cuts, prepend=0, append=size)


def deal(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Gives every client random samples of each class; ``counts``, (num_clients, num_classes), says how many.

    Example:
        >>> parts = deal(np.array([0, 1, 1, 1]), np.array([[1, 0], [0, 2]]), np.random.default_rng(0))
        >>> [len(part) for part in parts], parts[0].tolist()
        ([1, 2], [0])
    """
    num_clients = len(counts)
    owners = np.full(len(labels), num_clients)
    for samples, by_client in zip(group_by(labels, counts.shape[1]), counts.T, strict=True):
        chosen = rng.permutation(samples)[: by_client.sum()]
        owners[chosen] = np.repeat(np.arange(num_clients), by_client)
    return group_by(owners, num_clients + 1)[:-1]
