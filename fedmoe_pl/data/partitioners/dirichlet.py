"""Partitions by Dirichlet distributions that keep the sizes of the clients alike (METHODS 5.3 and 5.7)."""

from __future__ import annotations

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.data.partitioners.partitioner import (
    KEY,
    Partitioner,
    check_alpha,
    check_num_clients,
    check_samples_per_client,
    deal,
    group_by,
)

_ATTEMPTS = 1000  # of BalancedDirichlet, before it gives up


class Dirichlet(Partitioner):
    """Splits every class over the clients by shares drawn from a symmetric Dirichlet distribution.

    For each class, shares q ~ Dir(alpha 1_N) are drawn, and the shuffled samples of the class are cut at the
    cumulative shares, in the order of the clients (PFL-MoE, Guo et al. 2021; METHODS 5.1). The sizes of the clients
    are unequal. PFL-MoE's code rounds every share down or up by itself and drops the few samples that are left over
    (up to 23 of 50,000); here every sample goes to a client.

    Args:
        alpha: concentration; small values give each client few classes, large ones approach IID.

    Raises:
        MisconfigurationException: if ``alpha`` is not a finite number above 0.
    """

    def __init__(self, alpha: float) -> None:
        check_alpha(alpha)
        self.alpha = alpha

    def __call__(  # noqa: D102  (described in the base class)
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        num_clients = check_num_clients(num_clients, len(labels), self)
        owners = np.empty(len(labels), dtype=np.int64)
        for samples in group_by(labels, int(labels.max()) + 1):
            shares = rng.dirichlet(np.full(num_clients, self.alpha))
            cuts = np.rint(np.cumsum(shares[:-1]) * len(samples)).astype(np.int64)
            counts = np.diff(cuts, prepend=0, append=len(samples))
            owners[rng.permutation(samples)] = np.repeat(np.arange(num_clients), counts)
        return group_by(owners, num_clients)


class ClientDirichlet(Partitioner):
    """Gives every client equally many samples, of classes drawn from a prior of its own.

    Each client draws its shares of the classes q ~ Dir(alpha 1_C) and then its samples from q. What it draws of a class
    that is used up is drawn again from the other classes, by their shares (Hsu et al. 2019; METHODS 5.3); where these
    are all 0, it draws a new prior over the classes that are left.

    Args:
        alpha: concentration; small values give each client few classes, large ones all classes equally.
        samples_per_client: samples of every client.

    Raises:
        MisconfigurationException: for arguments outside their range; in the call for fewer samples than needed.
    """

    def __init__(self, alpha: float, samples_per_client: int) -> None:
        check_alpha(alpha)
        check_samples_per_client(samples_per_client)
        self.alpha = alpha
        self.samples_per_client = samples_per_client

    def __call__(  # noqa: D102  (described in the base class)
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        num_clients = check_num_clients(num_clients, len(labels), self)
        if self.samples_per_client * num_clients > len(labels):
            raise MisconfigurationException(
                f"{KEY}.samples_per_client is {self.samples_per_client}, but {len(labels)} training samples have only "
                f"{len(labels) // num_clients} for each of {num_clients} clients."
            )
        left = np.bincount(labels)
        counts = np.zeros((num_clients, len(left)), dtype=np.int64)
        for own in counts:
            prior = rng.dirichlet(np.full(len(left), self.alpha))
            while (missing := self.samples_per_client - own.sum()) > 0:
                prior[left == 0] = 0
                if prior.sum() == 0:
                    prior[left > 0] = rng.dirichlet(np.full((left > 0).sum(), self.alpha))
                taken = np.minimum(rng.multinomial(missing, prior / prior.sum()), left)
                own += taken
                left -= taken
        return deal(labels, counts, rng)


class BalancedDirichlet(Partitioner):
    """Splits every class over the clients by Dirichlet shares, and stops giving to clients that have their share.

    For each class in turn, shares are drawn from Dir(alpha 1) over the clients that hold less than the N-th part of all
    samples; the others get none of it. All of this is repeated until every client holds ``minimum_samples`` (as FedAPEN
    does for pFedMoE's practical case; METHODS 5.7). FedAPEN draws shares for all clients, sets some to 0 and divides by
    the sum, which is the same distribution.

    Args:
        alpha: concentration; small values give each client few classes, large ones approach IID.
        minimum_samples: samples that every client holds at least.

    Raises:
        MisconfigurationException: for arguments outside their range; in the call if there are too few samples, or no
            partition with this minimum is found in 1,000 attempts.
    """

    def __init__(self, alpha: float, minimum_samples: int = 10) -> None:
        check_alpha(alpha)
        if minimum_samples < 1:
            raise MisconfigurationException(
                f"{KEY}.minimum_samples is {minimum_samples}, but must be an integer of at least 1."
            )
        self.alpha = alpha
        self.minimum_samples = minimum_samples

    def __call__(  # noqa: D102  (described in the base class)
        self,
        labels: np.ndarray,
        num_clients: int | None,
        rng: np.random.Generator,
        client_ids: np.ndarray | None = None,
    ) -> list[np.ndarray]:
        num_clients = check_num_clients(num_clients, len(labels), self)
        available = np.bincount(labels)
        if self.minimum_samples * num_clients <= len(labels):
            for _ in range(_ATTEMPTS):
                counts = self._counts(available, num_clients, rng)
                if counts.sum(axis=1).min() >= self.minimum_samples:
                    return deal(labels, counts, rng)
        raise MisconfigurationException(
            f"{KEY}.minimum_samples is {self.minimum_samples}, but {_ATTEMPTS} attempts to share "
            f"{len(labels)} samples among {num_clients} clients gave none with so many for every client; lower it or "
            f"data.init_args.num_clients, or raise alpha above {self.alpha}."
        )

    def _counts(self, available: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Return how many samples of each class every client gets, shape (num_clients, num_classes)."""
        counts = np.zeros((num_clients, len(available)), dtype=np.int64)
        for c, size in enumerate(available.tolist()):
            # never empty: if every client had the N-th part, no samples would be left
            takers = np.flatnonzero(counts.sum(axis=1) * num_clients < available.sum())
            if size:
                shares = rng.dirichlet(np.full(len(takers), self.alpha))
                cuts = np.rint(np.cumsum(shares[:-1]) * size).astype(np.int64)
                counts[takers, c] = np.diff(cuts, prepend=0, append=size)
        return counts
