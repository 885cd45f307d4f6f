"""A round with secure aggregation: an update leaves its client masked, or not at all, and the server learns the sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends import Failure, GroupUpdate
from fedmoe_pl.backends.traffic import Traffic, updates_sent
from fedmoe_pl.deployment.answers import cannot_be_used, problem_of_weight, update_of
from fedmoe_pl.deployment.messages import Message
from fedmoe_pl.deployment.plan import ClientsPlan
from fedmoe_pl.deployment.remote_clients import AtClient
from fedmoe_pl.deployment.secure.protocol import (
    CODE,
    ENCRYPTED,
    KEY,
    SHARE,
    ClientHalf,
    MaskingError,
    PublicKeys,
    ServerHalf,
    TooFewError,
)
from fedmoe_pl.trees import Tree

KEYS, SHARES, COMMITMENT, CODES = "keys", "shares", "commitment", "codes"
"""Names of tensors of bytes: a client's or all clients' public keys, shares, a commitment, codes about survivors."""
Found = TypeVar("Found")


def context_of(values: Mapping[str, Any]) -> str:
    """Names the round that a message with these values is about."""
    return f"{values['run']} {values['round']} {values['phase']}"


def as_rows(rows: Sequence[bytes], length: int) -> Tensor:
    """Texts of bytes as a tensor of shape (n, length)."""
    return torch.from_numpy(np.frombuffer(bytearray(b"".join(rows)), np.uint8).reshape(len(rows), length))


def rows_of(message: Message, name: str, number: int, length: int) -> list[bytes]:
    """The rows of such a tensor of a message, the only one of this name; refuses one of another shape."""
    tensor = message.tensors.get(name)
    if tensor is None or tensor.dtype != torch.uint8 or tensor.shape != (number, length):
        raise MaskingError(f"its {name} have not {number} times {length} bytes")
    return [row.numpy().tobytes() for row in tensor]


def rows_of_others(name: str, length: int, clients: Sequence[int], own: int, message: Message) -> dict[int, bytes]:
    """The rows, by client, of a tensor of a message that has one for each of these clients but ``own``."""
    others = [client for client in clients if client != own]
    return dict(zip(others, rows_of(message, name, len(others), length), strict=True))


class MaskedUpdate:
    """What a client has trained in a round, as a message says: it answers the server's messages about it, each once.

    Only this object has the update's tensors, integers; other arguments as in ``ClientHalf``.
    """

    def __init__(
        self, client: int, threshold: int, message: Message, sent: Tree, cohort: int, num_clients: int
    ) -> None:
        self._half = ClientHalf(client, threshold, context_of(message.values), cohort, num_clients)
        self._sent = sent
        self._clients: list[int] = []  # those that have sent shares

    @property
    def keys(self) -> Tree:
        """The client's public keys of this round, which it sends in place of what it has trained."""
        return {KEYS: as_rows(self._half.keys, KEY)}

    def answer(self, message: Message) -> Message:
        """The answer to the message about the next step."""
        steps: dict[str, Callable[[Message, list[int]], Message]]
        steps = {"share": self._share, "mask": self._mask, "confirm": self._confirm, "unmask": self._unmask}
        clients = message.values["clients"]
        if context_of(message.values) != self._half.context:
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
        encrypted = rows_of_others(SHARES, ENCRYPTED, clients, self._half.client, message)
        sent, self._sent, self._clients = self._sent, {}, clients
        return Message("masked", tensors=self._half.mask(encrypted, sent))

    def _confirm(self, message: Message, clients: list[int]) -> Message:
        codes = self._half.confirm(clients)
        return Message("confirmed", tensors={CODES: as_rows([*codes.values()], CODE)})

    def _unmask(self, message: Message, clients: list[int]) -> Message:
        shares = self._half.unmask(rows_of_others(CODES, CODE, clients, self._half.client, message))
        return Message("unmasked", tensors={SHARES: as_rows([shares[each] for each in self._clients], SHARE)})


class MaskedPlan(ClientsPlan):
    """Asks clients to train, and learns the sum of their updates alone.

    A client that has trained answers with its public keys. Four more messages to each client follow: the keys of all,
    the shares of all, who has sent masked tensors, and the codes of all that were told the same about this. One that
    fails before it has sent its tensors is left out of the sum; later, its update counts.
    """

    trains = "train masked"

    def train(
        self, server: Tree, groups: Sequence[list[int]], kept: Mapping[int, Tree], round: int
    ) -> Iterator[GroupUpdate]:
        """Yields the survivors as one group, with the sum of their updates; no sum if too few are left."""
        clients = [client for group in groups for client in group]
        answers = self.trained(self.sent(server, clients, kept, round), kept, round)
        failed = dict[int, Failure]()
        try:
            update, keeps = self._sum(answers, failed, round)
        except TooFewError:
            yield GroupUpdate(None, {}, Traffic(), failed=failed)
            return
        except MaskingError as error:
            wrong = f"a client of the round, it is unknown which, has sent something wrong: {error}"
            reason = Failure(f"the sum of updates is not unmasked, because {wrong}")
            yield GroupUpdate(None, {}, Traffic(), failed={client: failed.get(client, reason) for client in answers})
            return
        traffic = sum((Traffic.of(update.sent) for _ in keeps), Traffic())
        recorded = keeps if self.training.record_transfers else []
        transfers = [each for client in recorded for each in updates_sent(client, update.sent, masked=True)]
        yield GroupUpdate(update, keeps, traffic, transfers, failed)

    def _sum(
        self, answers: Mapping[int, Message | Failure], failed: dict[int, Failure], round: int
    ) -> tuple[Update, dict[int, Tree]]:
        """The sum of the updates of those clients that do not fail, and what these keep; notes why others fail."""
        secure = self.training.secure_aggregation
        assert secure is not None and secure.threshold is not None
        values = {"run": self.clients.name, "phase": self.training.phase_name, "round": round}
        half = ServerHalf(secure.threshold, context_of(values))
        trained = _found(answers, self._trained_by, failed)
        keys = half.keys({client: keys for client, (keys, _, _) in trained.items()})

        of_all = {KEYS: as_rows([key for each in keys.values() for key in each], KEY)}
        answers = self._step("share", dict.fromkeys(keys, of_all), [*keys], round)
        shares = half.shares(_found(answers, partial(_shares, [*keys]), failed))

        of_senders = {
            client: {SHARES: as_rows([*encrypted.values()], ENCRYPTED)} for client, encrypted in shares.items()
        }
        answers = self._step("mask", of_senders, [*shares], round)
        weights = {client: weight for client, (_, weight, _) in trained.items()}
        survivors = half.add(_same_layout(_found(answers, partial(self._masked, weights, round), failed), failed))

        late = dict[int, Failure]()
        try:  # the updates of those that are gone now count, too, unless too few are left
            answers = self._step("confirm", {client: {} for client in survivors}, survivors, round)
            codes = half.codes(_found(answers, partial(rows_of_others, CODES, CODE, survivors), late))
            of_others = {client: {CODES: as_rows([*each.values()], CODE)} for client, each in codes.items()}
            answers = self._step("unmask", of_others, [*codes], round)
            sent = half.unmasked(_found(answers, partial(_given, [*shares]), late))
        except TooFewError:
            failed |= late
            raise
        keeps: dict[int, Tree] = {client: AtClient(trained[client][2]) for client in survivors}
        return Update(sent, sum(weights[client] for client in survivors)), keeps

    def _step(
        self, kind: str, tensors: Mapping[int, Tree], clients: list[int], round: int
    ) -> dict[int, Message | Failure]:
        """Clients' answers to the messages of a step."""
        values = {"phase": self.training.phase_name, "round": round, "clients": clients}
        return self.clients.ask(self.training, {each: Message(kind, values, tree) for each, tree in tensors.items()})

    def _trained_by(self, client: int, answer: Message) -> tuple[PublicKeys, float, int] | Failure:
        """The public keys of a client that has trained, its weight, and the number of the file with what it keeps."""
        weight, keeps = answer.values["weight"], answer.values["keeps"]
        if problem := problem_of_weight(weight, self.training, client):
            return Failure(problem)
        return PublicKeys(*rows_of(answer, KEYS, 2, KEY)), weight, keeps

    def _masked(self, weights: Mapping[int, float], round: int, client: int, answer: Message) -> Tree | Failure:
        """A client's masked tensors, whose values cannot be checked: names and shapes are those of its update."""
        initial, shown = self.training.of(client).initial, {}
        for name, tensor in answer.tensors.items():
            if tensor.dtype != torch.int64:
                return Failure(f"its {name[:100]} is not masked")
            known = initial.get(name)
            dtype = torch.float64 if known is None else known.dtype
            shown[name] = torch.zeros((), dtype=dtype).expand(tensor.shape)
        as_update = Message("update", {"weight": weights[client], "keeps": 0}, shown)
        update = update_of(as_update, self.training, client, round)
        return update if isinstance(update, Failure) else answer.tensors


def _found(
    answers: Mapping[int, Message | Failure],
    read: Callable[[int, Message], Found | Failure],
    failed: dict[int, Failure],
) -> dict[int, Found]:
    """What answers say; notes why others are none."""
    found = dict[int, Found]()
    for client, answer in answers.items():
        try:
            said = answer if isinstance(answer, Failure) else read(client, answer)
        except Exception as error:  # whatever a client has sent
            said = Failure(str(error)) if isinstance(error, MaskingError) else cannot_be_used("answer", error)
        if isinstance(said, Failure):
            failed[client] = said
        else:
            found[client] = said
    return found


def _shares(clients: Sequence[int], client: int, answer: Message) -> tuple[dict[int, bytes], bytes]:
    """A client's encrypted shares for the others, and its commitment."""
    encrypted = rows_of_others(SHARES, ENCRYPTED, clients, client, answer)
    return encrypted, rows_of(answer, COMMITMENT, 1, KEY)[0]


def _given(clients: Sequence[int], client: int, answer: Message) -> dict[int, bytes]:
    """The shares that a client gives for every client."""
    return dict(zip(clients, rows_of(answer, SHARES, len(clients), SHARE), strict=True))


def _same_layout(masked: dict[int, Tree], failed: dict[int, Failure]) -> dict[int, Tree]:
    """The masked tensors of those clients that have sent the same names and shapes as most."""
    layouts = {client: tuple((name, tree[name].shape) for name in sorted(tree)) for client, tree in masked.items()}
    usual = Counter(layouts.values()).most_common(1)
    for client in [client for client, layout in layouts.items() if layout != usual[0][0]]:
        failed[client] = Failure("its tensors are not those of most clients")
        del masked[client]
    return masked
