"""Robust aggregations need each client's update: what a few clients send, whatever it is, moves the result only so far.

=========================  =====================================================  =====================================
aggregation                source                                                 differences
=========================  =====================================================  =====================================
``CoordinateMedian``       Yin et al., ICML 2018, Definition 1
``TrimmedMean``            Yin et al., ICML 2018, Definition 2                    a number of attackers, not a share
``GeometricMedian``        Pillutla et al., IEEE TSP 2022, Algorithm 2 (RFA)      uniform weights; exact distances
``MultiKrum``              Blanchard et al., NeurIPS 2017                         averages n - f by default
``CenteredClipping``       Karimireddy et al., ICML 2021, Algorithm 1             starts at the server's state
``NearestNeighborMixing``  Allouah et al., AISTATS 2023, Algorithm 2 (NNM)
``Bucketing``              Karimireddy et al., ICLR 2022, Algorithm 1
=========================  =====================================================  =====================================

The library byzfl (0.0.11, MIT) has them too, and was compared: it agrees, except that its Krum counts one more neighbor
than the paper and its geometric median takes three steps. It is not used: for torch tensors it computes in 32 bits, its
NNM holds ``n (n - f)`` copies of the model, its centered clipping has a state that a checkpoint would lose, its
bucketing draws from the global generator, and importing it takes seconds, with seaborn and pandas.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from fedmoe_pl.aggregation.aggregation import Aggregation, Cohort
from fedmoe_pl.algorithms.client import Client, Update
from fedmoe_pl.checks import check_at_least, check_number
from fedmoe_pl.trees import Tree, precise


@dataclass
class CollectedUpdates(Update):
    """Updates that are kept apart.

    Attributes:
        updates: each client's update, by client.
    """

    updates: dict[int, Update] = field(default_factory=dict)


class CollectingAggregation(Aggregation, ABC):
    """Aggregates the vectors of clients' changes: all shared tensors of real or complex numbers, minus the server's.

    Statistics of batch normalization are part of the vectors; of integers, such as its counters, the server takes the
    lower median. A change that is not finite counts as none. The updates of the whole cohort are in memory at once.
    """

    @abstractmethod
    def of_clients(
        self, clients: Sequence[int], vectors: Tensor, weights: Sequence[float], generator: Generator
    ) -> Tensor:
        """Aggregates vectors.

        Args:
            clients: the client of each vector, in ascending order.
            vectors: one row per client, shape (n, d).
            weights: the weight that the algorithm gave to each of them.
            generator: random numbers of this round.

        Returns:
            A vector of shape (d,).
        """

    def of_client(self, client: Client, update: Update) -> Update:
        """The update, kept apart from others."""
        return self.of_remote_client(client.id, update)

    def of_remote_client(self, client_id: int, update: Update) -> CollectedUpdates:
        """The update, kept apart from others."""
        return CollectedUpdates(
            update.sent, update.weight, update.state, {client_id: Update(update.sent, update.weight)}
        )

    def combine(self, a: Update, b: Update) -> Update:
        """The updates of both."""
        assert isinstance(a, CollectedUpdates) and isinstance(b, CollectedUpdates)
        return CollectedUpdates({}, a.weight + b.weight, updates={**a.updates, **b.updates})

    def aggregate(
        self, start: Tree, combined: Update | None, state: Tree, cohort: Cohort, generator: Generator
    ) -> tuple[Update, Tree]:
        """The server's tensors plus the aggregated changes."""
        assert isinstance(combined, CollectedUpdates), "cohorts have one size"
        clients = sorted(combined.updates)  # results do not depend on who was trained with whom
        updates = [combined.updates[client] for client in clients]
        names = [name for name, tensor in start.items() if tensor.is_floating_point() or tensor.is_complex()]
        before, after = _flat(start, names), torch.stack([_flat(update.sent, names) for update in updates])
        changes = (after - before).where(after != before, 0.0)  # in a mask, infinite values stay what they are
        changes = changes.where(changes.isfinite().all(1, keepdim=True), 0.0)
        change = self.of_clients(clients, changes, [update.weight for update in updates], generator)
        sent = _unflat(before + change, start, names)
        for name in start.keys() - sent.keys():
            values = [update.sent[name] for update in updates]
            sent[name] = torch.stack(values).sort(dim=0).values[(len(values) - 1) // 2]
        return Update({name: sent[name] for name in start}, combined.weight), state


class RobustAggregation(CollectingAggregation, ABC):
    """Aggregates the vectors of all clients in the same way, whoever they are; all count the same."""

    is_uniform = True

    def of_client(self, client: Client, update: Update) -> Update:
        """The update with the weight 1."""
        return super().of_client(client, Update(update.sent, 1, update.state))

    @abstractmethod
    def of_vectors(self, vectors: Tensor, generator: Generator) -> Tensor:
        """Aggregates vectors.

        Args:
            vectors: one row per client, shape (n, d).
            generator: random numbers of this round.

        Returns:
            A vector of shape (d,).
        """

    def of_clients(
        self, clients: Sequence[int], vectors: Tensor, weights: Sequence[float], generator: Generator
    ) -> Tensor:
        """Aggregates vectors; see :meth:`of_vectors`."""
        return self.of_vectors(vectors, generator)


def _real(tensor: Tensor) -> Tensor:
    """The tensor, with two real numbers in the last dimension in place of a complex one."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _flat(tree: Tree, names: Sequence[str]) -> Tensor:
    """The tensors as one vector of real numbers, at least in float32."""
    return torch.cat([_real(precise(tree[name])).flatten() for name in names])


def _unflat(vector: Tensor, like: Tree, names: Sequence[str]) -> Tree:
    """The inverse of :func:`_flat`, with the shapes and types of ``like``."""
    tree = {name: torch.empty(like[name].shape, dtype=like[name].dtype) for name in names}
    reals = [*map(_real, tree.values())]
    for real, part in zip(reals, vector.split([real.numel() for real in reals]), strict=True):
        real.copy_(part.view(real.shape))
    return tree


_MOST_STEPS = 1000  # of Weiszfeld's algorithm, which is slow if the median is close to a vector, but not at it
_TOLERANCE = 1e-7  # the sum of distances is then above the smallest one by at most twice this share


class CoordinateMedian(RobustAggregation):
    """The median of each coordinate; of an even number, the mean of the two in the middle.

    Example:
        >>> CoordinateMedian().of_vectors(torch.tensor([[0.0], [9.0], [1.0], [2.0]]), Generator())
        tensor([1.5000])
    """

    def of_vectors(self, vectors: Tensor, generator: Generator) -> Tensor:
        """The median along the first axis."""
        return _median(vectors)


class TrimmedMean(RobustAggregation):
    """The mean of each coordinate without its ``num_byzantine`` smallest and largest values.

    Args:
        num_byzantine: f, the largest number of attackers in a round; at least 2 f + 1 clients must train in it.
    """

    def __init__(self, num_byzantine: int) -> None:
        check_at_least(self, "num_byzantine", num_byzantine, 0)
        self.num_byzantine = num_byzantine
        self.min_clients = 2 * num_byzantine + 1

    def of_vectors(self, vectors: Tensor, generator: Generator) -> Tensor:
        """The mean of the n - 2 f values in the middle."""
        return vectors.sort(dim=0).values[self.num_byzantine : len(vectors) - self.num_byzantine].mean(0)


class GeometricMedian(RobustAggregation):
    """The point with the smallest sum of distances to the clients' vectors, by Weiszfeld's algorithm."""

    def of_vectors(self, vectors: Tensor, generator: Generator) -> Tensor:
        """Starts at each coordinate's median; a vector that steps come close to may itself be the median."""
        center, flat = _median(vectors).double(), _TOLERANCE * len(vectors)  # no attacker moves this median far
        tried = set[int]()
        for _ in range(_MOST_STEPS):
            step, slope, nearest = _weiszfeld_step(vectors, center)
            if slope <= flat:  # before any vector: of an even number on a line, many points are medians
                break
            if nearest not in tried and _weiszfeld_step(vectors, vectors[nearest].double())[1] <= flat:
                return vectors[nearest]
            tried.add(nearest)
            center = center + step
        return center.to(vectors)


class MultiKrum(RobustAggregation):
    """The mean of the vectors that are closest to their neighbors.

    A vector's score is the sum of its squared distances to its n - f - 2 nearest neighbors.

    Args:
        num_byzantine: f, the largest number of attackers in a round; at least 2 f + 3 clients must train in it.
        num_selected: how many vectors with the lowest scores are averaged: 1 is Krum. None is n - f.
    """

    def __init__(self, num_byzantine: int, num_selected: int | None = None) -> None:
        check_at_least(self, "num_byzantine", num_byzantine, 0)
        check_at_least(self, "num_selected", num_selected, 1)
        self.num_byzantine = num_byzantine
        self.num_selected = num_selected
        self.min_clients = max(2 * num_byzantine + 3, num_selected or 0)

    def of_vectors(self, vectors: Tensor, generator: Generator) -> Tensor:
        """The mean of those with the lowest scores."""
        n = len(vectors)
        squared = _distances(vectors).square().sort(dim=1).values[:, 1 : n - self.num_byzantine - 1]  # without itself
        best = squared.sum(1).argsort(stable=True)[: self.num_selected or n - self.num_byzantine]
        return vectors[best.sort().values].mean(0)


class CenteredClipping(RobustAggregation):
    """The mean of vectors that are shortened to ``max_norm``, seen from the center of the step before.

    The first center is the server's state. In the paper, it is the aggregate of the round before, because it
    aggregates clients' momenta, which change little between rounds.

    Args:
        max_norm: tau, the largest distance from the center.
        iterations: number of steps.
    """

    def __init__(self, max_norm: float, iterations: int = 3) -> None:
        check_number(self, "max_norm", max_norm, above=0)
        check_at_least(self, "iterations", iterations, 1)
        self.max_norm = max_norm
        self.iterations = iterations

    def of_vectors(self, vectors: Tensor, generator: Generator) -> Tensor:
        """``v + mean((x_i - v) min(1, tau / |x_i - v|))``, repeated."""
        center = torch.zeros_like(vectors[0])
        for _ in range(self.iterations):
            scales = (self.max_norm / _norms(vectors - center)).clamp(max=1).to(vectors)
            center = center + (vectors - center).mul_(scales[:, None]).mean(0)
        return center


class NearestNeighborMixing(RobustAggregation):
    """Replaces each vector by the mean of the n - f nearest ones, itself among them, before another aggregation.

    Without it, robust aggregations lose accuracy where clients' data differ.

    Args:
        aggregation: aggregates the mixed vectors.
        num_byzantine: f, the largest number of attackers in a round.
    """

    def __init__(self, aggregation: RobustAggregation, num_byzantine: int) -> None:
        check_at_least(self, "num_byzantine", num_byzantine, 0)
        self.aggregation = aggregation
        self.num_byzantine = num_byzantine
        self.min_clients = max(2 * num_byzantine + 1, aggregation.min_clients)

    def of_vectors(self, vectors: Tensor, generator: Generator) -> Tensor:
        """Aggregates the mixed vectors; the nearest to a vector is the vector itself."""
        nearest = _distances(vectors).argsort(dim=1, stable=True)[:, : len(vectors) - self.num_byzantine]
        mixed = torch.stack([vectors[rows.sort().values].mean(0) for rows in nearest])
        return self.aggregation.of_vectors(mixed, generator)


class Bucketing(RobustAggregation):
    """Averages vectors in random buckets, before another aggregation of the buckets' means.

    One attacker spoils one bucket, so that a ``num_byzantine`` of the other aggregation still counts attackers.

    Args:
        aggregation: aggregates the means.
        size: number of vectors in a bucket; the last one may have fewer.
    """

    def __init__(self, aggregation: RobustAggregation, size: int = 2) -> None:
        check_at_least(self, "size", size, 1)
        self.aggregation = aggregation
        self.size = size
        self.min_clients = (aggregation.min_clients - 1) * size + 1  # so that there are enough buckets

    def of_vectors(self, vectors: Tensor, generator: Generator) -> Tensor:
        """Aggregates the means of the buckets."""
        order = torch.randperm(len(vectors), generator=generator)
        means = torch.stack([vectors[bucket].mean(0) for bucket in order.split(self.size)])
        return self.aggregation.of_vectors(means, generator)


def _median(vectors: Tensor) -> Tensor:
    """The median of each coordinate, shape (d,)."""
    n = len(vectors)
    return vectors.sort(dim=0).values[(n - 1) // 2 : n // 2 + 1].mean(0)


def _norms(vectors: Tensor) -> Tensor:
    """The length of each row, shape (n,), in float64: squares of what an attacker sends may exceed float32."""
    return torch.linalg.vector_norm(vectors, dim=1, dtype=torch.float64)


def _weiszfeld_step(vectors: Tensor, point: Tensor) -> tuple[Tensor, Tensor, int]:
    """A step towards the geometric median, the slope of the sum of distances along it, and the index of the nearest.

    The slope is 0 at the median only. From one of the vectors, where Weiszfeld's own step has no length, the step is
    that of Vardi and Zhang (PNAS 2000).
    """
    distances = _norms(vectors - point)
    weights = (1 / distances).where(distances > 0, 0)
    total = weights.sum().clamp_min(torch.finfo(weights.dtype).tiny)  # 0 if all vectors are at the point
    step = (weights / total) @ (vectors - point)
    pull = total * step.norm()  # the length of the sum of unit vectors to the others
    slope = (pull - (distances == 0).sum()).clamp_min(0)
    return slope / pull * step, slope, int(distances.argmin())


def _distances(vectors: Tensor) -> Tensor:
    """Euclidean distances of all pairs, shape (n, n); not by products, which cancel where vectors are close."""
    return torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist")
