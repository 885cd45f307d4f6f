"""The samples of every client, as one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor


class Parts(Sequence[Tensor]):
    """The sample indices of every client: one tensor and how it is cut, in place of a tensor per client.

    ``parts[client]`` is a view. Pickled by itself a view takes the indices of all clients along; clone it before.

    Args:
        indices: the clients' samples one after another, int64, shape (n,).
        sizes: how many of them each client has, int64, shape (num_clients,), n in all.

    Example:
        >>> parts = Parts(torch.tensor([5, 1, 2]), torch.tensor([2, 0, 1]))
        >>> [part.tolist() for part in parts]
        [[5, 1], [], [2]]
    """

    def __init__(self, indices: Tensor, sizes: Tensor) -> None:
        self.indices = indices
        self.sizes = sizes
        self._ends = sizes.cumsum(0)

    def __len__(self) -> int:
        """Return the number of clients."""
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> Tensor: ...
    @overload
    def __getitem__(self, client: slice) -> Parts: ...
    def __getitem__(self, client: int | slice) -> Tensor | Parts:
        """Return one client's samples as a view, or those of several clients as parts of their own."""
        chosen = range(len(self))[client]  # counts from the end where negative, and raises IndexError
        if isinstance(chosen, range):
            return self.select(torch.tensor(chosen, dtype=torch.int64))
        size = int(self.sizes[chosen])
        return self.indices.narrow(0, int(self._ends[chosen]) - size, size)

    def __reduce__(self) -> tuple[type[Parts], tuple[Tensor, Tensor]]:
        return Parts, (self.indices, self.sizes)

    def select(self, clients: Tensor) -> Parts:
        """Return the parts of some clients, in their order.

        Args:
            clients: int64, shape (k,).
        """
        sizes = self.sizes[clients]
        moved = self._ends[clients] - sizes.cumsum(0)  # how far each client's samples stand from their new place
        return Parts(self.indices[torch.arange(int(sizes.sum())) + moved.repeat_interleave(sizes)], sizes)
