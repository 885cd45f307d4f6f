"""The samples of a client that pictures show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import FederatedDataModule


def check_clients(owner: object, clients: Sequence[int], datamodule: FederatedDataModule) -> None:
    """Refuses ids that no client has."""
    ids = range(datamodule.num_clients)
    if not clients or not {*clients} <= {*ids}:
        raise InvalidArgumentError(owner, "clients", clients, f"ids of clients, from 0 to {len(ids) - 1}")


def own_batch(datamodule: FederatedDataModule, client: int, number: int | None = None) -> tuple[Tensor, Any]:
    """Indices of a client's first held-out samples, or training samples if it has none, and their batch."""
    held_out = datamodule.test_samples[client]
    samples = (held_out if len(held_out) else datamodule.train_samples[client])[:number]
    (batch,) = datamodule.batches(samples, batch_size=len(samples))
    return samples, batch


def words_of(datamodule: FederatedDataModule, ids: Tensor) -> list[list[str]] | None:
    """The words of texts, if samples (n, T) are ids of words in the data's vocabulary."""
    if not datamodule.vocabulary or ids.dim() != 2 or ids.is_floating_point():
        return None
    words = ["", "?", *datamodule.vocabulary]
    return [[words[token] if token < len(words) else "?" for token in row] for row in ids.tolist()]
