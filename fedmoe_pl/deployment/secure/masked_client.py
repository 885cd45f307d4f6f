"""A client's update in a round with secure aggregation: it leaves the client masked, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedmoe_pl.deployment.messages import Message
from fedmoe_pl.deployment.secure.protocol import (
    CODE,
    ENCRYPTED,
    KEY,
    SHARE,
    ClientHalf,
    MaskingError,
    PublicKeys,
)
from fedmoe_pl.trees import Tree

KEYS, SHARES, COMMITMENT, CODES = "keys", "shares", "commitment", "codes"
"""Names of tensors of bytes: a client's or all clients' public keys, shares, a commitment, codes about survivors."""


def context_of(run: str, phase: str, round: int) -> str:
    """Names a round."""
    return f"{run} {round} {phase}"


def as_rows(rows: Sequence[bytes], length: int) -> Tensor:
    """Texts of bytes as a tensor of shape (n, length)."""
    return torch.from_numpy(np.frombuffer(bytearray(b"".join(rows)), np.uint8).reshape(len(rows), length))


def rows_of(message: Message, name: str, number: int, length: int) -> list[bytes]:
    """The rows of such a tensor of a message, the only one of this name; refuses one of another shape."""
    tensor = message.tensors.get(name)
    if tensor is None or tensor.dtype != torch.uint8 or tensor.shape != (number, length):
        raise MaskingError(f"its {name} have not {number} times {length} bytes")
    return [row.numpy().tobytes() for row in tensor]


class MaskedUpdate:
    """What a client has trained in a round: it answers the server's messages about it, each once.

    Args:
        half: the client's half of the round.
        sent: the update's tensors as integers, which this object alone has.
    """

    def __init__(self, half: ClientHalf, sent: Tree) -> None:
        self._half = half
        self._sent = sent
        self._clients: list[int] = []  # those that have sent shares

    @classmethod
    def of(
        cls, client: int, threshold: int, message: Message, sent: Tree, cohort: int, num_clients: int
    ) -> MaskedUpdate:
        """That of a client which was just trained as a message says; other arguments as in ``ClientHalf``."""
        values = message.values
        context = context_of(values["run"], values["phase"], values["round"])
        return cls(ClientHalf(client, threshold, context, cohort, num_clients), sent)

    @property
    def keys(self) -> Tree:
        """The client's public keys of this round, which it sends in place of what it has trained."""
        return {KEYS: as_rows(self._half.keys, KEY)}

    def answer(self, message: Message) -> Message:
        """The answer to the message about the next step."""
        steps: dict[str, Callable[[Message, list[int]], Message]]
        steps = {"share": self._share, "mask": self._mask, "confirm": self._confirm, "unmask": self._unmask}
        values, clients = message.values, message.values["clients"]
        if context_of(values["run"], values["phase"], values["round"]) != self._half.context:
            raise MaskingError("it has trained in another round")
        if clients != sorted({*clients}):
            raise MaskingError("its clients are not in order")
        return steps[message.kind](message, clients)

    def _share(self, message: Message, clients: list[int]) -> Message:
        rows = rows_of(message, KEYS, 2 * len(clients), KEY)
        keys = {client: PublicKeys(*rows[2 * i : 2 * i + 2]) for i, client in enumerate(clients)}
        encrypted, commitment = self._half.share(keys)
        shares = as_rows([encrypted[other] for other in clients if other in encrypted], ENCRYPTED)
        return Message("shared", tensors={SHARES: shares, COMMITMENT: as_rows([commitment], KEY)})

    def _mask(self, message: Message, clients: list[int]) -> Message:
        others = [client for client in clients if client != self._half.client]
        rows = rows_of(message, SHARES, len(others), ENCRYPTED)
        sent, self._sent, self._clients = self._sent, {}, clients
        return Message("masked", tensors=self._half.mask(dict(zip(others, rows, strict=True)), sent))

    def _confirm(self, message: Message, clients: list[int]) -> Message:
        codes = self._half.confirm(clients)
        return Message("confirmed", tensors={CODES: as_rows([*codes.values()], CODE)})

    def _unmask(self, message: Message, clients: list[int]) -> Message:
        others = [client for client in clients if client != self._half.client]
        codes = rows_of(message, CODES, len(others), CODE)
        shares: Mapping[int, bytes] = self._half.unmask(dict(zip(others, codes, strict=True)))
        return Message("unmasked", tensors={SHARES: as_rows([shares[each] for each in self._clients], SHARE)})
