"""The base of aggregations that need each client's update."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Generator, Tensor

from fedmoe_pl.aggregation.aggregation import Aggregation, Cohort
from fedmoe_pl.algorithms.client import Client, Update
from fedmoe_pl.trees import Tree, precise


@dataclass
class CollectedUpdates(Update):
    """Updates that are kept apart.

    Attributes:
        updates: each client's update, by client.
    """

    updates: dict[int, Update] = field(default_factory=dict)


class CollectingAggregation(Aggregation, ABC):
    """Aggregates the vectors of clients' changes: all shared floating-point tensors, minus the server's.

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
        names = [name for name, tensor in start.items() if tensor.is_floating_point()]
        before = _flat(start, names)
        changes = torch.stack([_flat(update.sent, names) - before for update in updates])
        changes = changes.where(changes.isfinite().all(1, keepdim=True), 0.0)
        change = self.of_clients(clients, changes, [update.weight for update in updates], generator)
        sent = _unflat(before + change, start, names)
        for name in start.keys() - sent.keys():
            sent[name] = torch.stack([update.sent[name] for update in updates]).median(dim=0).values
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


def _flat(tree: Tree, names: Sequence[str]) -> Tensor:
    """The tensors as one vector, at least in float32."""
    return torch.cat([precise(tree[name]).flatten() for name in names])


def _unflat(vector: Tensor, like: Tree, names: Sequence[str]) -> Tree:
    """The inverse of :func:`_flat`, with the shapes and types of ``like``."""
    parts = vector.split([like[name].numel() for name in names])
    return {name: part.reshape(like[name].shape).to(like[name].dtype) for name, part in zip(names, parts, strict=True)}
