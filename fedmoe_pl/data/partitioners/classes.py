"""Partitions that give every client few classes, or favour few of them (METHODS 5.2, 5.4 to 5.6)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.data.partitioners.partitioner import KEY, Partitioner, check_num_clients, check_samples_per_client, deal

Pairs = Literal["random", "product"]
Share = Literal["uniform", "dirichlet"]


class MajorityClasses(Partitioner):
    """Gives every client two majority classes that together make up a share of its samples.

    The other classes share the rest as evenly as whole samples allow, and what cannot be shared evenly comes from the
    classes of which most samples are left. With 10 classes a share of 0.2 is IID, and a share of 1 leaves only the two
    majority classes (Listo Zec et al. 2020; Isaksson et al. 2022; METHODS 5.2). Unlike in the official code no sample
    is held twice, and the other classes share by class, not by how many images each has left.

    Args:
        majority_share: share p of the two majority classes together, in (0, 1].
        samples_per_client: samples of every client; None for the most that the data allow.
        pairs: "random" draws two different classes per client, each class as often as any other; "product" is the
            official order, (client // classes, client % classes), for at most classes**2 clients; where both are the
            same class, the whole share is of that class.

    Raises:
        MisconfigurationException: for arguments outside their range; in the call where the samples do not suffice.

    Example:
        >>> parts = MajorityClasses(0.5, 8, pairs="product")(np.arange(60) % 3, 2, np.random.default_rng(0))
        >>> [np.bincount(part % 3).tolist() for part in parts]
        [[4, 2, 2], [2, 2, 4]]
    """

    def __init__(self, majority_share: float, samples_per_client: int | None = None, pairs: Pairs = "random") -> None:
        if not 0 < majority_share <= 1:
            raise MisconfigurationException(f"{KEY}.majority_share is {majority_share}, but must be in (0, 1].")
        check_samples_per_client(samples_per_client)
        _check_choice("pairs", pairs, get_args(Pairs))
        self.majority_share = majority_share
        self.samples_per_client = samples_per_client
        self.pairs = pairs

    def __call__(  # noqa: D102  (described in the base class)
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        num_clients = check_num_clients(num_clients, len(labels), self)
        available = np.bincount(labels)
        pairs = self._pairs(num_clients, len(available), rng)
        priority = rng.random((num_clients, len(available)))  # whose turn it is where equally many samples are left

        def counts(samples_per_client: int) -> np.ndarray | None:
            return self._counts(samples_per_client, pairs, available, priority)

        return deal(labels, _possible_counts(counts, self.samples_per_client, len(labels) // num_clients), rng)

    def _pairs(self, num_clients: int, num_classes: int, rng: np.random.Generator) -> np.ndarray:
        """Return the two majority classes of every client, shape (num_clients, 2)."""
        needed = 2 if self.majority_share == 1 else 3
        if num_classes < needed:
            raise MisconfigurationException(
                f"{KEY}.majority_share is {self.majority_share}, but the data have {num_classes} classes, and two "
                f"majority classes{' and others' if needed == 3 else ''} need at least {needed}."
            )
        if self.pairs == "random":
            return draw_classes(num_clients, 2, num_classes, rng)
        if num_clients > num_classes**2:
            raise MisconfigurationException(
                f"data.init_args.num_clients is {num_clients}, but pairs: product of the partitioner MajorityClasses "
                f"has pairs of {num_classes} classes for at most {num_classes**2} clients."
            )
        return np.stack(np.divmod(np.arange(num_clients), num_classes), axis=1)

    def _counts(self, n: int, pairs: np.ndarray, available: np.ndarray, priority: np.ndarray) -> np.ndarray | None:
        """Return how many samples of each class every client gets, (num_clients, num_classes), or None if too many."""
        clients = np.arange(len(pairs))
        majority = round(n * self.majority_share)
        is_other = np.ones_like(priority, dtype=bool)
        is_other[clients[:, None], pairs] = False
        others = np.maximum(is_other.sum(axis=1), 1)  # 1 where there are none, which then share nothing
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


class TwoClasses(Partitioner):
    """Gives every client two different classes, in equal or unequal numbers (LotteryFL, Li et al. 2020; METHODS 5.5).

    Every class is used as often as any other. FedMoE-DA's balanced case has 250 samples of each class, and its
    unbalanced one 375 and 125.

    Args:
        samples_per_client: samples of every client.
        balance: share of the first class, in (0, 1): 0.5 is balanced, 0.75 unbalanced.

    Raises:
        MisconfigurationException: for arguments outside their range; in the call where the samples do not suffice.
    """

    def __init__(self, samples_per_client: int = 500, balance: float = 0.5) -> None:
        check_samples_per_client(samples_per_client)
        if not (0 < balance < 1 and 0 < round(samples_per_client * balance) < samples_per_client):
            raise MisconfigurationException(
                f"{KEY}.balance is {balance}, but must be in (0, 1) and leave each of the two classes at least one of "
                f"the {samples_per_client} samples per client."
            )
        self.samples_per_client = samples_per_client
        self.balance = balance

    def __call__(  # noqa: D102  (described in the base class)
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        num_clients = check_num_clients(num_clients, len(labels), self)
        available = np.bincount(labels)
        pairs = draw_classes(num_clients, 2, len(available), rng)

        def counts(samples_per_client: int) -> np.ndarray | None:
            first = round(samples_per_client * self.balance)
            counts = np.zeros((num_clients, len(available)), dtype=np.int64)
            np.put_along_axis(counts, pairs, np.array([first, samples_per_client - first]), axis=1)
            return None if (counts.sum(axis=0) > available).any() else counts

        return deal(labels, _possible_counts(counts, self.samples_per_client, len(labels) // num_clients), rng)


class Shards(Partitioner):
    """Sorts the samples by class, cuts them into equal shards and gives every client some at random.

    The shards are as equal as whole samples allow. Two shards of a client may be of one class (McMahan et al. 2017;
    METHODS 5.4).

    Args:
        shards_per_client: shards of every client.

    Raises:
        MisconfigurationException: if ``shards_per_client`` is below 1; in the call for fewer samples than shards.
    """

    def __init__(self, shards_per_client: int = 2) -> None:
        if shards_per_client < 1:
            raise MisconfigurationException(
                f"{KEY}.shards_per_client is {shards_per_client}, but must be an integer of at least 1."
            )
        self.shards_per_client = shards_per_client

    def __call__(  # noqa: D102  (described in the base class)
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        num_clients = check_num_clients(num_clients, len(labels), self)
        num_shards = num_clients * self.shards_per_client
        if num_shards > len(labels):
            raise MisconfigurationException(
                f"{KEY}.shards_per_client is {self.shards_per_client}, but {num_clients} clients would need "
                f"{num_shards} shards, and there are {len(labels)} training samples."
            )
        shards = np.array_split(np.argsort(labels, kind="stable"), num_shards)
        owned = rng.permutation(num_shards).reshape(num_clients, -1)
        return [np.concatenate([shards[shard] for shard in own]) for own in owned]


class Pathological(Partitioner):
    """Gives every client a few classes, and each class in random shares to the clients that have it.

    Every class has as many clients as any other, up to one. The clients of a class share its samples, by shares from
    U(0.4, 0.6), divided by their sum, or from a Dirichlet distribution (the generator of pFedHN, which the authors of
    pFedMoE, Yi et al. 2024, use in other works; pFedMoE names a Dirichlet distribution; METHODS 5.6). Unlike in that
    code the classes of a client differ, and every sample of a class that has a client is dealt.

    Args:
        classes_per_client: classes of every client.
        share: "uniform" for shares from U(0.4, 0.6), "dirichlet" for a symmetric Dirichlet distribution.
        concentration: of the Dirichlet distribution.

    Raises:
        MisconfigurationException: for arguments outside their range; in the call for fewer classes than
            ``classes_per_client``.
    """

    def __init__(self, classes_per_client: int = 2, share: Share = "uniform", concentration: float = 1.0) -> None:
        if classes_per_client < 1:
            raise MisconfigurationException(
                f"{KEY}.classes_per_client is {classes_per_client}, but must be an integer of at least 1."
            )
        _check_choice("share", share, get_args(Share))
        if not 0 < concentration < math.inf:
            raise MisconfigurationException(
                f"{KEY}.concentration is {concentration}, but must be a finite number above 0."
            )
        self.classes_per_client = classes_per_client
        self.share = share
        self.concentration = concentration

    def __call__(  # noqa: D102  (described in the base class)
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        num_clients = check_num_clients(num_clients, len(labels), self)
        available = np.bincount(labels)
        classes = draw_classes(num_clients, self.classes_per_client, len(available), rng)
        counts = np.zeros((num_clients, len(available)), dtype=np.int64)
        for c in np.unique(classes).tolist():
            holders = np.flatnonzero((classes == c).any(axis=1))
            if self.share == "uniform":
                shares = rng.uniform(0.4, 0.6, len(holders))
            else:
                shares = rng.dirichlet(np.full(len(holders), self.concentration))
            cuts = np.rint(np.cumsum(shares / shares.sum()) * available[c]).astype(np.int64)
            counts[holders, c] = np.diff(cuts, prepend=0)
        return deal(labels, counts, rng)


def draw_classes(num_clients: int, per_client: int, num_classes: int, rng: np.random.Generator) -> np.ndarray:
    """Draw different classes for every client, such that each class is drawn as often as any other, up to one.

    A client draws among the classes that were drawn least so far.

    Returns:
        Classes in random order, int64, shape (num_clients, per_client).

    Raises:
        MisconfigurationException: for fewer classes than ``per_client``.
    """
    if per_client > num_classes:
        raise MisconfigurationException(
            f"data.init_args.partitioner gives every client {per_client} different classes, but the data have "
            f"{num_classes}."
        )
    drawn = np.zeros(num_classes, dtype=np.int64)
    classes = np.empty((num_clients, per_client), dtype=np.int64)
    for own in classes:
        own[:] = np.lexsort((rng.random(num_classes), drawn))[:per_client]
        drawn[own] += 1
    return rng.permuted(classes, axis=1)


def _possible_counts(
    counts: Callable[[int], np.ndarray | None], samples_per_client: int | None, highest: int
) -> np.ndarray:
    """Return the counts for ``samples_per_client``, or those for the most that are possible (None)."""
    wanted = None if samples_per_client is None else counts(samples_per_client)
    if wanted is not None:
        return wanted
    possible, too_many = 0, highest + 1
    while too_many - possible > 1:
        middle = (possible + too_many) // 2
        possible, too_many = (possible, middle) if counts(middle) is None else (middle, too_many)
    most = counts(possible) if samples_per_client is None and possible else None
    if most is None:
        raise MisconfigurationException(
            f"{KEY}.samples_per_client is {'null' if samples_per_client is None else samples_per_client}, but the "
            f"classes have only enough training samples for {possible} per client; lower it or "
            "data.init_args.num_clients."
        )
    return most


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise MisconfigurationException(f"{KEY}.{name} is '{value}', but must be one of {', '.join(choices)}.")
