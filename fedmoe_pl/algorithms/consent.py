"""Clients and samples that stay out of the federated training."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Generator, Tensor

from fedmoe_pl.data import ClientSamples
from fedmoe_pl.seeds import Purpose, derive_seed

_TRAINING, _VALIDATION = 1, 2  # separate the draws of a client's training and validation samples


class OptOut:
    """The clients and samples of a federated phase that influence nothing that leaves a client.

    Args:
        clients: share of the clients that opt out with all their data, rounded down to a number of them. The draw
            depends on the run's seed only.
        data: share of its training samples, and of its validation samples, that every other client keeps out; both
            numbers are rounded down. The draws depend on the run's seed and the client only.
    """

    def __init__(self, clients: float = 0.0, data: float = 0.0) -> None:
        self.clients = clients
        self.data = data

    def participants(self, clients: Sequence[int], seed: int) -> Sequence[int]:
        """The clients that opt in, in the order of ``clients``: rounds are drawn from them."""
        number = min(floor_of_share(self.clients, len(clients)), len(clients) - 1)
        if number <= 0:
            return clients
        rng = np.random.default_rng(derive_seed(seed, Purpose.OPT_OUT))
        out = set(rng.choice(len(clients), number, replace=False).tolist())
        return [client for place, client in enumerate(clients) if place not in out]

    def opted_in(self, client_id: int, samples: Tensor, seed: int, validation: bool = False) -> Tensor:
        """The training or validation samples of a participant that opt in."""
        number = min(floor_of_share(self.data, len(samples)), len(samples) - 1)
        if number <= 0:
            return samples
        purpose = _VALIDATION if validation else _TRAINING
        generator = Generator().manual_seed(derive_seed(seed, Purpose.OPT_OUT, client_id, purpose))
        return samples[torch.randperm(len(samples), generator=generator)[number:]]

    def opted_in_of_all(self, parts: ClientSamples, seed: int, validation: bool = False) -> ClientSamples:
        """The samples of each client that opt in: none of a client that does not take part."""
        participants = self.participants(range(len(parts)), seed)
        if len(participants) == len(parts) and not self.data:
            return parts
        chosen = [samples[:0] for samples in parts]
        for client in participants:
            chosen[client] = self.opted_in(client, parts[client], seed, validation)
        return ClientSamples(torch.cat(chosen), torch.tensor([len(samples) for samples in chosen]))


def floor_of_share(share: float, number: int) -> int:
    """A share of a number, rounded down as if the share were an exact decimal.

    Example:
        >>> floor_of_share(0.29, 100), int(0.29 * 100)
        (29, 28)
    """
    return int(share * number + 1e-9)  # 0.29 * 100 is 28.999999999999996
