"""Deals the samples of a data set to its clients, and refuses what the data do not allow."""

from __future__ import annotations

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor

from fedmoe_pl.data.partitioners.all_to_one import AllToOne
from fedmoe_pl.data.partitioners.dirichlet import Dirichlet
from fedmoe_pl.data.partitioners.partitioner import Partitioner
from fedmoe_pl.data.parts import Parts
from fedmoe_pl.data.splits import balanced_subset


def deal_samples(
    partitioner: Partitioner,
    y: Tensor,
    has_classes: bool,
    num_clients: int | None,
    rng: np.random.Generator,
    client_ids: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Deals samples to clients.

    Args:
        partitioner: decides who gets which.
        y: the target of each sample, shape (n, ...).
        has_classes: whether these are classes.
        num_clients: number of clients; None if the data or the partitioner determine it.
        rng: source of randomness.
        client_ids: the client that each sample comes from; None if unknown.

    Returns:
        The clients' samples one after another, int64, and the number of each client.

    Raises:
        MisconfigurationException: if a client gets none.
    """
    classes = y if has_classes else torch.zeros(len(y), dtype=torch.int64)
    parts = partitioner(classes.numpy(), num_clients, rng, client_ids)
    sizes = np.array([len(part) for part in parts])
    if not sizes.all() and not isinstance(partitioner, AllToOne):
        advice = f", raise alpha above {partitioner.alpha}" if isinstance(partitioner, Dirichlet) else ""
        raise MisconfigurationException(
            f"{type(partitioner).__name__} leaves client {sizes.argmin()} of {len(parts)} without training samples; "
            f"lower num_clients{advice} or change partition_seed."
        )
    return np.concatenate(parts).astype(np.int64, copy=False), sizes


def check_partitioner(owner: object, partitioner: Partitioner, has_classes: bool, stratify: bool) -> None:
    """Refuses arguments that need classes, for data without them.

    Args:
        owner: the data module; the message names its class.
        partitioner: deals the samples.
        has_classes: whether the targets are classes; then nothing is refused.
        stratify: whether each class is split separately.

    Raises:
        MisconfigurationException: if one of them needs classes.
    """
    name = type(owner).__name__
    if has_classes:
        return
    if partitioner.needs_classes:
        raise MisconfigurationException(
            f"{name}: partitioner is {type(partitioner).__name__}, which deals classes, but must be IID, NaturalIds, "
            "PredefinedIndices or one of your own whose needs_classes is False, because the targets are not one class "
            "for each sample."
        )
    if stratify:
        raise MisconfigurationException(
            f"{name}: stratify is True, but must be False, because the targets are not one class for each sample."
        )


def pooled_test_samples(owner: object, test_samples: Parts, test_fraction: float) -> Tensor:
    """The global test set of pooled samples: what all clients hold out, ascending.

    Args:
        owner: the data module; the message names its class.
        test_samples: the samples that each client holds out.
        test_fraction: their share.

    Raises:
        MisconfigurationException: if there are none.
    """
    if not len(test_samples.indices):
        raise MisconfigurationException(
            f"{type(owner).__name__}: test_fraction is {test_fraction}, which gives no client a test sample; raise "
            "test_fraction or lower num_clients."
        )
    return test_samples.indices.sort().values


def some_test_samples(owner: object, samples: Tensor, y: Tensor, has_classes: bool, size: int, seed: int) -> Tensor:
    """Chooses global test samples at random: equally many of each class, if there are classes.

    Args:
        owner: the data module; the message names its class.
        samples: indices of all global test samples.
        y: the targets of all samples.
        has_classes: whether they are classes.
        size: number of samples to choose.
        seed: seed of the partition.

    Raises:
        MisconfigurationException: if there are too few samples.
    """
    if has_classes:
        return balanced_subset(samples, y[samples], size, seed)
    if size > len(samples):
        raise MisconfigurationException(
            f"{type(owner).__name__}: global_test_size is {size}, but must be at most {len(samples)}, the size of the "
            "global test set."
        )
    return balanced_subset(samples, torch.zeros(len(samples), dtype=torch.int64), size, seed)
