"""Partitions that give every client only a few classes, or most of its samples from a few classes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from functools import partial
from typing import Literal, get_args

import numpy as np

from fedmoe_pl.checks import InvalidArgumentError, check_at_least, check_choice, check_number
from fedmoe_pl.data.partitioners.partitioner import LabelPartitioner, cut, deal, drawn_until_enough

Pairs = Literal["random", "product"]
ShareKind = Literal["uniform", "dirichlet"]


class MajorityClasses(LabelPartitioner):
    """Gives every client two majority classes, which together make up a given share of its samples.

    The other samples come in equal numbers from the other classes; if they cannot be divided equally, one more comes
    from each of those classes that have most samples left. With 10 classes, a share of 0.2 is IID, and a share of 1
    means only the two majority classes (Listo Zec et al. 2020; Isaksson et al. 2022). In the official code, two clients
    may hold the same sample, and a class with more images left gives more of the other samples.

    Args:
        majority_share: share p of the two majority classes together, in (0, 1].
        samples_per_client: samples of every client; None for as many as the data allow.
        pairs: "random" draws two different classes per client, all classes equally often, up to one; "product" is the
            official order, (client // classes, client % classes), for at most classes**2 clients. If both classes are
            the same, the whole share comes from that class.

    Example:
        >>> parts = MajorityClasses(0.5, 8, pairs="product")(np.arange(60) % 3, 2, np.random.default_rng(0))
        >>> [np.bincount(part % 3).tolist() for part in parts]
        [[4, 2, 2], [2, 2, 4]]
    """

    def __init__(self, majority_share: float, samples_per_client: int | None = None, pairs: Pairs = "random") -> None:
        check_number(self, "majority_share", majority_share, above=0, most=1)
        check_at_least(self, "samples_per_client", samples_per_client, 1)
        check_choice(self, "pairs", pairs, get_args(Pairs))
        self.majority_share = majority_share
        self.samples_per_client = samples_per_client
        self.pairs = pairs

    def partition(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Deals the samples."""
        available = np.bincount(labels)
        pairs = self._pairs(num_clients, len(available), rng)
        priority = rng.random((num_clients, len(available)))  # decides between classes with equally many samples left
        counts = partial(self._counts, pairs=pairs, available=available, priority=priority)
        return deal(labels, _possible_counts(self, counts, len(labels) // num_clients), rng)

    def _pairs(self, num_clients: int, num_classes: int, rng: np.random.Generator) -> np.ndarray:
        """The two majority classes of every client, shape (num_clients, 2)."""
        if num_classes < 3 and (self.majority_share < 1 or num_classes < 2):
            reason = f"the data have {num_classes} classes"
            raise InvalidArgumentError(self, "majority_share", self.majority_share, "1 with two classes", reason)
        if self.pairs == "random":
            return draw_classes(num_clients, 2, num_classes, rng)
        if num_clients > num_classes**2:
            allowed = f"at most {num_classes**2}, the number of pairs of classes"
            raise InvalidArgumentError(self, "num_clients", num_clients, allowed)
        return np.stack(np.divmod(np.arange(num_clients), num_classes), axis=1)

    def _counts(self, n: int, pairs: np.ndarray, available: np.ndarray, priority: np.ndarray) -> np.ndarray | None:
        """Returns how many samples of each class every client gets, (num_clients, num_classes), or None if too many."""
        clients = np.arange(len(pairs))
        majority = round(n * self.majority_share)
        is_other = np.ones_like(priority, dtype=bool)
        is_other[clients[:, None], pairs] = False
        others = np.maximum(is_other.sum(axis=1), 1)  # a divisor, so 1 if there are none; majority is then n
        counts = np.where(is_other, ((n - majority) // others)[:, None], 0)
        counts[clients, pairs[:, 0]] += majority - majority // 2
        counts[clients, pairs[:, 1]] += majority // 2
        left = available - counts.sum(axis=0)
        for client in np.flatnonzero((n - majority) % others).tolist():
            order = np.lexsort((priority[client], -left))
            chosen = order[is_other[client, order]][: n - counts[client].sum()]
            counts[client, chosen] += 1
            left[chosen] -= 1
        return None if left.min() < 0 else counts


class TwoClasses(LabelPartitioner):
    """Gives every client two different classes, in equal or unequal numbers (LotteryFL, Li et al. 2020).

    The numbers of clients per class differ by at most one. In FedMoE-DA's balanced case, a client has 250 samples of
    each class; in its unbalanced case, 375 and 125.

    Args:
        samples_per_client: samples of every client.
        balance: share of the first class, in (0, 1): 0.5 is balanced, 0.75 unbalanced.
    """

    def __init__(self, samples_per_client: int = 500, balance: float = 0.5) -> None:
        check_at_least(self, "samples_per_client", samples_per_client, 2)
        if not (0 < balance < 1 and 0 < round(samples_per_client * balance) < samples_per_client):
            allowed = f"between 0 and 1, so that each class has at least one of {samples_per_client} samples"
            raise InvalidArgumentError(self, "balance", balance, allowed)
        self.samples_per_client = samples_per_client
        self.balance = balance

    def partition(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Deals the samples."""
        available = np.bincount(labels)
        pairs = draw_classes(num_clients, 2, len(available), rng)

        def counts(samples_per_client: int) -> np.ndarray | None:
            first = round(samples_per_client * self.balance)
            counts = np.zeros((num_clients, len(available)), dtype=np.int64)
            np.put_along_axis(counts, pairs, np.array([first, samples_per_client - first]), axis=1)
            return None if (counts.sum(axis=0) > available).any() else counts

        return deal(labels, _possible_counts(self, counts, len(labels) // num_clients), rng)


class Shards(LabelPartitioner):
    """Sorts the samples by class, cuts them into equal shards and gives every client some at random.

    The sizes of the shards differ by at most one. Two shards of a client may have the same class (McMahan et al. 2017).

    Args:
        shards_per_client: shards of every client.
    """

    def __init__(self, shards_per_client: int = 2) -> None:
        check_at_least(self, "shards_per_client", shards_per_client, 1)
        self.shards_per_client = shards_per_client

    def partition(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Deals the samples."""
        num_shards = num_clients * self.shards_per_client
        if num_shards > len(labels):
            allowed = f"at most {len(labels) // num_clients}, the number of samples per client"
            raise InvalidArgumentError(self, "shards_per_client", self.shards_per_client, allowed)
        shards = np.array_split(np.argsort(labels, kind="stable"), num_shards)
        by_client = rng.permutation(num_shards).reshape(num_clients, -1)
        return [np.concatenate([shards[shard] for shard in of_client]) for of_client in by_client]


class Pathological(LabelPartitioner):
    """Gives every client a few classes, and divides each class among its clients by random shares.

    The numbers of clients per class differ by at most one. The shares either come from U(0.4, 0.6) and are divided by
    their sum, as in the code of pFedHN, which the authors of pFedMoE (Yi et al. 2024) use in other works; or they come
    from a Dirichlet distribution, which pFedMoE names. Unlike in that code, a client's classes are always different,
    and all samples of a class that has a client are dealt. All of this is repeated until every client holds
    ``minimum_samples``.

    Args:
        classes_per_client: classes of every client.
        share: "uniform" for shares from U(0.4, 0.6), "dirichlet" for a symmetric Dirichlet distribution.
        concentration: concentration of the Dirichlet distribution, for ``share="dirichlet"``; None means 1.
        minimum_samples: smallest number of samples of a client; None means 1.
    """

    def __init__(
        self,
        classes_per_client: int = 2,
        share: ShareKind = "uniform",
        concentration: float | None = None,
        minimum_samples: int | None = None,
    ) -> None:
        check_choice(self, "share", share, get_args(ShareKind))
        if concentration is not None and share != "dirichlet":
            raise InvalidArgumentError(self, "concentration", concentration, f"left out with the share '{share}'")
        check_at_least(self, "classes_per_client", classes_per_client, 1)
        self.classes_per_client = classes_per_client
        self.share = share
        self.concentration = 1.0 if concentration is None else concentration
        check_number(self, "concentration", self.concentration, above=0)
        check_at_least(self, "minimum_samples", minimum_samples, 1)
        self.minimum_samples = minimum_samples

    def partition(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Deals the samples."""
        draw = partial(self._counts, np.bincount(labels), num_clients, rng)
        return deal(labels, drawn_until_enough(self, num_clients, len(labels), draw), rng)

    def _counts(self, available: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Returns how many samples of each class every client gets, shape (num_clients, num_classes)."""
        classes = draw_classes(num_clients, self.classes_per_client, len(available), rng)
        counts = np.zeros((num_clients, len(available)), dtype=np.int64)
        for c in np.unique(classes).tolist():
            holders = np.flatnonzero((classes == c).any(axis=1))
            if self.share == "uniform":
                shares = rng.uniform(0.4, 0.6, len(holders))
            else:
                shares = rng.dirichlet(np.full(len(holders), self.concentration))
            counts[holders, c] = cut(int(available[c]), shares / shares.sum())
        return counts


def draw_classes(num_clients: int, per_client: int, num_classes: int, rng: np.random.Generator) -> np.ndarray:
    """Draws different classes for every client, (num_clients, per_client), from those that have been drawn least."""
    if per_client > num_classes:
        allowed = f"at most {num_classes}, as in the data"
        raise InvalidArgumentError("partitioner", "the number of classes of a client", per_client, allowed)
    drawn = np.zeros(num_classes, dtype=np.int64)
    classes = np.empty((num_clients, per_client), dtype=np.int64)
    for of_client in classes:
        of_client[:] = np.lexsort((rng.random(num_classes), drawn))[:per_client]
        drawn[of_client] += 1
    return rng.permuted(classes, axis=1)


def _possible_counts(
    partitioner: MajorityClasses | TwoClasses, counts: Callable[[int], np.ndarray | None], highest: int
) -> np.ndarray:
    """The counts for ``samples_per_client`` or, if that is None, for the highest number for which there are counts."""
    asked = partitioner.samples_per_client
    asked_counts = None if asked is None else counts(asked)
    if asked_counts is not None:
        return asked_counts
    possible = bisect_left(range(1, highest + 1), True, key=lambda number: counts(number) is None)
    most = counts(possible) if asked is None and possible else None
    if most is None:
        because = "the classes have too few training samples for so many clients"
        raise InvalidArgumentError(partitioner, "samples_per_client", asked, f"at most {possible}", because)
    return most
