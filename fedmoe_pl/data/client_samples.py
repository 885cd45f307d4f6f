"""The samples of all clients, as one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch
from torch import Tensor


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
