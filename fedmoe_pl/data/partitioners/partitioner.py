"""Who holds which samples: partitions of a data set over the clients of a federation (METHODS section 5)."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

KEY = "data.init_args.partitioner.init_args"
"""Where a partitioner's arguments stand in a configuration."""


class Partitioner(ABC):
    """Deals the training samples to the clients; write one for a partition of your own.

    The lists that it returns must be disjoint. What they contain may depend only on the arguments of the call.
    """

    @abstractmethod
    def __call__(
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        """Return the sample indices of every client.

        Args:
            labels: class of every training sample, shape (n,), integers from 0.
            num_clients: number of clients; None leaves it to the data.
            rng: the only source of randomness.
            client_ids: the client that every sample comes from, shape (n,); None if the data do not say.

        Returns:
            One array of indices into ``labels`` per client.
        """


def group_by(groups: np.ndarray, num_groups: int) -> list[np.ndarray]:
    """Return the indices of the members of each group, in ascending order.

    Args:
        groups: group of every sample, shape (n,), integers from 0 to ``num_groups - 1``.
        num_groups: number of groups; those without members get empty arrays.

    Example:
        >>> [part.tolist() for part in group_by(np.array([1, 0, 1]), 3)]
        [[1], [0, 2], []]
    """
    ends = np.cumsum(np.bincount(groups, minlength=num_groups))
    order = np.argsort(groups, kind="stable")
    # slices rather than np.split, which takes several times as long for 100,000 clients
    return [order[start:end] for start, end in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True)]


def deal(labels: np.ndarray, counts: np.ndarray, rng: np.random.Generator) -> list[np.ndarray]:
    """Give every client random samples of each class, in given numbers; the others stay with nobody.

    Args:
        labels: class of every sample, shape (n,), integers from 0.
        counts: samples of each class that every client gets, shape (num_clients, num_classes); of no class more than
            there are.
        rng: source of randomness.

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


def check_alpha(alpha: float) -> None:
    """Refuse a concentration that is not a finite number above 0.

    Raises:
        MisconfigurationException: with one sentence.
    """
    if not 0 < alpha < math.inf:
        raise MisconfigurationException(f"{KEY}.alpha is {alpha}, but must be a finite number above 0.")


def check_samples_per_client(samples_per_client: int | None) -> None:
    """Refuse a number of samples below 1; None leaves it to the data.

    Raises:
        MisconfigurationException: with one sentence.
    """
    if samples_per_client is not None and samples_per_client < 1:
        raise MisconfigurationException(
            f"{KEY}.samples_per_client is {samples_per_client}, but must be an integer of at least 1."
        )


def check_num_clients(num_clients: int | None, num_samples: int, partitioner: Partitioner) -> int:
    """Return ``num_clients``, or refuse it.

    Raises:
        MisconfigurationException: if it is None or not from 1 to the number of samples.
    """
    name = type(partitioner).__name__
    if num_clients is None:
        raise MisconfigurationException(
            f"data.init_args.num_clients is not set, but the partitioner {name} needs an integer of at least 1."
        )
    if not 1 <= num_clients <= num_samples:
        raise MisconfigurationException(
            f"data.init_args.num_clients is {num_clients}, but the partitioner {name} can share {num_samples} "
            f"training samples among 1 to {num_samples} clients."
        )
    return num_clients
