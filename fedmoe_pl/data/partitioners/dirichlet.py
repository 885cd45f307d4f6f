"""Partitions by Dirichlet distributions."""

from __future__ import annotations

from functools import partial

import numpy as np

from fedmoe_pl.checks import InvalidArgumentError, check_at_least, check_number
from fedmoe_pl.data.partitioners.partitioner import LabelPartitioner, cut, deal, drawn_until_enough, group_by


class Dirichlet(LabelPartitioner):
    """Divides every class among the clients by shares from a symmetric Dirichlet distribution.

    For each class, shares q ~ Dir(alpha 1_N) are drawn, and the shuffled samples of the class are cut at the
    cumulative shares, in the order of the clients (PFL-MoE, Guo et al. 2021). The clients differ in size. PFL-MoE's
    code rounds every share separately and drops the few samples that are left over (up to 23 of 50,000); here every
    sample goes to a client. All of this is repeated until every client holds ``minimum_samples``.

    Args:
        alpha: concentration, above 0; small values give each client few classes, large ones approach IID.
        minimum_samples: smallest number of samples of a client; None means 1. Flower and PFLlib, too, draw again.
    """

    def __init__(self, alpha: float, minimum_samples: int | None = None) -> None:
        check_number(self, "alpha", alpha, above=0)
        check_at_least(self, "minimum_samples", minimum_samples, 1)
        self.alpha = alpha
        self.minimum_samples = minimum_samples

    def partition(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Deals the samples."""
        return drawn_until_enough(self, num_clients, len(labels), lambda: self._dealt(labels, num_clients, rng))

    def _dealt(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        owners = np.empty(len(labels), dtype=np.int64)
        for samples in group_by(labels, int(labels.max()) + 1):
            counts = cut(len(samples), rng.dirichlet(np.full(num_clients, self.alpha)))
            owners[rng.permutation(samples)] = np.repeat(np.arange(num_clients), counts)
        return group_by(owners, num_clients)


class ClientDirichlet(LabelPartitioner):
    """Gives every client equally many samples, with class shares that each client draws for itself.

    Each client draws its class shares q ~ Dir(alpha 1_C), and then its samples by q (Hsu et al. 2019). If a class has
    too few samples left, the missing ones are drawn from the other classes, by their shares. If these are all 0, the
    client draws new shares for the classes that still have samples.

    Args:
        alpha: concentration; small values give each client few classes, large ones all classes equally.
        samples_per_client: samples of every client.
    """

    def __init__(self, alpha: float, samples_per_client: int) -> None:
        check_number(self, "alpha", alpha, above=0)
        check_at_least(self, "samples_per_client", samples_per_client, 1)
        self.alpha = alpha
        self.samples_per_client = samples_per_client

    def partition(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Deals the samples."""
        if self.samples_per_client * num_clients > len(labels):
            allowed = f"at most {len(labels) // num_clients} for {num_clients} clients"
            raise InvalidArgumentError(self, "samples_per_client", self.samples_per_client, allowed)
        left = np.bincount(labels)
        counts = np.zeros((num_clients, len(left)), dtype=np.int64)
        for of_client in counts:
            shares = rng.dirichlet(np.full(len(left), self.alpha))
            while (missing := self.samples_per_client - of_client.sum()) > 0:
                shares[left == 0] = 0
                if shares.sum() == 0:
                    shares[left > 0] = rng.dirichlet(np.full((left > 0).sum(), self.alpha))
                taken = np.minimum(rng.multinomial(missing, shares / shares.sum()), left)
                of_client += taken
                left -= taken
        return deal(labels, counts, rng)


class BalancedDirichlet(LabelPartitioner):
    """Divides every class by Dirichlet shares among those of the N clients that hold less than 1/N of all samples.

    For each class in turn, shares are drawn from Dir(alpha 1) for these clients; the others get none of that class. All
    of this is repeated until every client holds ``minimum_samples`` (FedAPEN's partition, which pFedMoE's practical
    case uses). FedAPEN draws shares for all clients, sets some to 0 and divides by the sum, which gives the same
    distribution.

    Args:
        alpha: concentration; small values give each client few classes, large ones approach IID.
        minimum_samples: smallest number of samples of a client.
    """

    def __init__(self, alpha: float, minimum_samples: int = 10) -> None:
        check_number(self, "alpha", alpha, above=0)
        check_at_least(self, "minimum_samples", minimum_samples, 1)
        self.alpha = alpha
        self.minimum_samples = minimum_samples

    def partition(self, labels: np.ndarray, num_clients: int, rng: np.random.Generator) -> list[np.ndarray]:
        """Deals the samples."""
        available = np.bincount(labels)
        draw = partial(self._counts, available, num_clients, rng)
        return deal(labels, drawn_until_enough(self, num_clients, len(labels), draw), rng)

    def _counts(self, available: np.ndarray, num_clients: int, rng: np.random.Generator) -> np.ndarray:
        """Returns how many samples of each class every client gets, shape (num_clients, num_classes)."""
        counts = np.zeros((num_clients, len(available)), dtype=np.int64)
        for c, size in enumerate(available.tolist()):
            # never empty: if every client held 1/N of the samples, none would be left
            takers = np.flatnonzero(counts.sum(axis=1) * num_clients < available.sum())
            if size:
                counts[takers, c] = cut(size, rng.dirichlet(np.full(len(takers), self.alpha)))
        return counts
