"""The samples of all clients, as one tensor, and which of them are held out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.client_names import numbered_clients
from fedmoe_pl.data.map_style import MapStyleData
from fedmoe_pl.data.partitioners.partitioner import group_by


class ClientSamples(Sequence[Tensor]):
    """The sample indices of all clients in one tensor, instead of one tensor per client.

    ``parts[client]`` is a view. Clone it before pickling, because a view is pickled with the indices of all clients.

    Args:
        indices: the clients' samples one after another, int64, shape (n,).
        sizes: number of samples of each client, int64, shape (num_clients,); their sum is n.

    Example:
        >>> parts = ClientSamples(torch.tensor([5, 1, 2]), torch.tensor([2, 0, 1]))
        >>> [part.tolist() for part in parts]
        [[5, 1], [], [2]]
    """

    def __init__(self, indices: Tensor, sizes: Tensor) -> None:
        self.indices = indices
        self.sizes = sizes
        self._ends = sizes.cumsum(0)

    def __len__(self) -> int:
        """Returns the number of clients."""
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> Tensor: ...
    @overload
    def __getitem__(self, client: slice) -> ClientSamples: ...
    def __getitem__(self, client: int | slice) -> Tensor | ClientSamples:
        """Returns one client's samples as a view, or those of several clients as new ``ClientSamples``."""
        chosen = range(len(self))[client]  # counts from the end if negative, and raises IndexError
        if isinstance(chosen, range):
            return self.select(torch.tensor(chosen, dtype=torch.int64))
        size = int(self.sizes[chosen])
        return self.indices.narrow(0, int(self._ends[chosen]) - size, size)

    def __reduce__(self) -> tuple[type[ClientSamples], tuple[Tensor, Tensor]]:
        return ClientSamples, (self.indices, self.sizes)

    def select(self, clients: Tensor) -> ClientSamples:
        """Returns the parts of some clients, in their order in ``clients``.

        Args:
            clients: int64, shape (k,).
        """
        sizes = self.sizes[clients]
        offsets = self._ends[clients] - sizes.cumsum(0)  # from the new to the old position of each client's samples
        return ClientSamples(self.indices[torch.arange(int(sizes.sum())) + offsets.repeat_interleave(sizes)], sizes)


def joined(one: ClientSamples, other: ClientSamples) -> ClientSamples:
    """Each client's samples in the first parts, followed by those in the second."""
    both = ClientSamples(torch.cat((one.indices, other.indices)), torch.cat((one.sizes, other.sizes)))
    in_turn = torch.arange(len(both)).view(2, -1).T.flatten()
    return ClientSamples(both.select(in_turn).indices, one.sizes + other.sizes)


_GLOBAL_TEST = (0, 0)  # spawn key of the random numbers for the global test set; clients' keys have one number


def split(
    samples: np.ndarray,
    sizes: np.ndarray,
    test_fraction: float,
    validation_fraction: float,
    seed: int,
    labels: np.ndarray | None = None,
) -> tuple[ClientSamples, ClientSamples, ClientSamples]:
    """Splits every client's samples into training, validation and test; each client has its own random numbers.

    The fractions are rounded to whole samples, and at least one sample is left for training; with ``labels``, the
    classes of all samples, at least one of each class. ``samples`` may be shuffled in place.
    """
    n, ends = len(sizes), np.cumsum(sizes)
    for client in np.flatnonzero(_cuts(sizes, test_fraction, validation_fraction)[:, :2].any(axis=1)).tolist():
        rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(client,)))
        rng.shuffle(samples[ends[client] - sizes[client] : ends[client]])
    if labels is not None:
        num_classes = int(labels.max()) + 1
        cells = np.repeat(np.arange(n) * num_classes, sizes) + labels[samples]  # one for each client and class
        samples, sizes = samples[np.argsort(cells, kind="stable")], np.bincount(cells, minlength=n * num_classes)
    cuts = torch.from_numpy(_cuts(sizes, test_fraction, validation_fraction))
    use = torch.arange(3, dtype=torch.uint8).repeat(len(sizes)).repeat_interleave(cuts.flatten())
    indices = torch.from_numpy(samples)
    by_client = cuts.view(n, -1, 3).sum(dim=1)
    test, validation, train = (ClientSamples(indices[use == i], by_client[:, i].contiguous()) for i in range(3))
    return train, validation, test


def _cuts(sizes: np.ndarray, test_fraction: float, validation_fraction: float) -> np.ndarray:
    """Returns how many samples are for test, validation and training, int64, shape (len(sizes), 3)."""
    most = np.maximum(sizes - 1, 0)  # at least one sample is left for training
    n_test = np.minimum(np.rint(sizes * test_fraction), most)
    n_validation = np.minimum(np.rint(sizes * validation_fraction), most - n_test)
    return np.stack((n_test, n_validation, sizes - n_test - n_validation), axis=1).astype(np.int64)


def pooled_ids(owner: object, data: Arrays | MapStyleData) -> np.ndarray | None:
    """The client that each sample comes from, training samples first; None if the data do not say."""
    if data.client_train is None:
        return None
    if not data.sizes[1]:
        return data.client_train
    if data.client_test is None:
        raise InvalidArgumentError(owner, "pool", True, "False", "only the training samples have client ids")
    return np.concatenate((data.client_train, data.client_test))


def natural_test_samples(owner: object, data: Arrays | MapStyleData, test_fraction: float) -> ClientSamples:
    """The test samples of each natural client that has training samples."""
    if test_fraction > 0:
        reason = "the data have test samples of every client"
        raise InvalidArgumentError(owner, "test_fraction", test_fraction, "0", reason)
    assert data.client_train is not None and data.client_test is not None
    ids, _ = numbered_clients(data.client_train)
    order = np.argsort(ids)
    places = np.searchsorted(ids, data.client_test, sorter=order)
    client = order[np.minimum(places, len(ids) - 1)]
    client[ids[client] != data.client_test] = len(ids)
    if len(others := np.unique(data.client_test[client == len(ids)])):
        rank_zero_warn(
            f"{type(owner).__name__}: client_test has {len(others)} ids that no training sample has, such as "
            f"'{others[0]}'; their samples are in the global test set only."
        )
    parts = group_by(client, len(ids) + 1)[:-1]
    sizes = torch.tensor([len(part) for part in parts])
    return ClientSamples(torch.from_numpy(np.concatenate(parts) + data.sizes[0]), sizes)


def balanced_subset(owner: object, samples: Tensor, labels: Tensor, size: int, seed: int) -> Tensor:
    """Chooses global test samples at random, ascending; the first classes may have one sample more than the others."""
    classes, counts = labels.unique(return_counts=True)
    wanted = torch.full_like(counts, size // len(classes))
    wanted[: size % len(classes)] += 1
    if (counts < wanted).any():
        allowed = f"from 1 to {int(counts.min()) * len(classes)}, with equally many samples of each class"
        raise InvalidArgumentError(owner, "global_test_size", size, allowed)
    rng = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=_GLOBAL_TEST))
    chosen = [
        rng.permutation(samples[labels == c].numpy())[:n]
        for c, n in zip(classes.tolist(), wanted.tolist(), strict=True)
    ]
    return torch.from_numpy(np.sort(np.concatenate(chosen)))
