"""Secure aggregation: the server learns the sum of what clients send, and no single summand.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017
(https://eprint.iacr.org/2017/281): the protocol with double masking, Figure 4, with its consistency check. Every pair
of clients agrees on a mask that one of them adds and the other subtracts; each client also adds a mask of its own. What
takes both away again, or the masks of a client that has dropped out, is shared among all clients.

A server that lies to clients about each other, but passes on their genuine keys, unmasks no sum of fewer than the
threshold: shares can be decrypted only among clients that were given the same keys, at most a cohort of them, and are
given away only after as many as the threshold, which is more than half of it, have named the same survivors.

=============  ============================================  ==========================================================
topic          paper                                         here
=============  ============================================  ==========================================================
integers       modulo any R                                  modulo 2^64, as 64-bit integers that overflow
agreement      Diffie-Hellman on NIST P-256, SHA-256         X25519, HKDF with SHA-256
encryption     AES-GCM                                       the same, with a key for each message
mask           AES in counter mode                           ChaCha20
shares         Shamir's, modulo a prime                      the same, modulo 2^521 - 1
consistency    signatures, with keys that a public key       codes with the keys of each pair, which the server
               infrastructure vouches for                    passes on: one that makes up clients or their keys is
                                                             not noticed
own mask       its shares are taken as they are              a client also commits itself to it, so that a wrong share
                                                             does not give a wrong sum
=============  ============================================  ==========================================================
"""

from __future__ import annotations

# pyright: reportMissingImports=false
# cryptography comes with Flower, which is not installed where types are checked.
import hmac
import json
import secrets
from collections.abc import Collection, Iterable, Mapping
from hashlib import sha256
from typing import NamedTuple

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedmoe_pl.deployment.messages import BadMessageError
from fedmoe_pl.trees import Tree

KEY = 32
"""Bytes of a key, a seed or a commitment."""
SHARE = 66
"""Bytes of a share."""
ENCRYPTED = 2 * SHARE + 16
"""Bytes of a client's two shares for another one, encrypted."""
CODE = 32
"""Bytes of the code by which a client tells another one whom it takes for survivors."""
_PRIME = 2**521 - 1
_CHUNK = 2**17  # integers of a mask that are in memory at once


class MaskingError(BadMessageError):
    """What another party has sent does not fit the protocol; nobody unmasks anything."""


class TooFewError(MaskingError):
    """Fewer clients than the threshold are left in a round."""


class PublicKeys(NamedTuple):
    """A client's public keys of one round: one encrypts the shares that it gets, from the other follow its masks."""

    encryption: bytes
    mask: bytes


def split(secret: bytes, threshold: int, clients: Iterable[int]) -> dict[int, bytes]:
    """Shamir's shares of a secret: so many of them give it back, fewer say nothing about it."""
    coefficients = [secrets.randbelow(_PRIME) for _ in range(threshold - 1)] + [int.from_bytes(secret, "big")]
    shares = {}
    for client in clients:
        value = 0
        for coefficient in coefficients:  # Horner's scheme; at 0 it is the secret
            value = (value * (client + 1) + coefficient) % _PRIME
        shares[client] = value.to_bytes(SHARE, "big")
    return shares


def joined(shares: Mapping[int, bytes]) -> bytes:
    """The secret that shares give: another one if they are wrong or too few, unless that is no key."""
    values = {client + 1: int.from_bytes(share, "big") for client, share in shares.items()}
    secret = 0
    for x, value in values.items():  # Lagrange's polynomial at 0
        numerator = denominator = 1
        for other in values.keys() - {x}:
            numerator = numerator * other % _PRIME
            denominator = denominator * (other - x) % _PRIME
        secret += value * numerator * pow(denominator, -1, _PRIME)
    if max(values.values()) >= _PRIME or (secret := secret % _PRIME) >= 2 ** (8 * KEY):
        raise MaskingError("the shares give no key")
    return secret.to_bytes(KEY, "big")


def derived(secret: bytes, *purpose: str | int) -> bytes:
    """A key for one purpose."""
    return HKDF(SHA256(), KEY, None, json.dumps(purpose).encode() if purpose else b"").derive(secret)


def agreed(private: X25519PrivateKey, public: bytes, *purpose: str | int) -> bytes:
    """The key for one purpose that only the owners of both keys know."""
    try:
        return derived(private.exchange(X25519PublicKey.from_public_bytes(public)), *purpose)
    except ValueError as error:  # a point with which everybody agrees on the same
        raise MaskingError("a public key is none") from error


def _add_mask(tensors: Tree, key: bytes, sign: int) -> None:
    """Adds pseudorandom integers to all tensors in place, or subtracts them; their names give the order."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    for name in sorted(tensors):
        values = tensors[name].view(-1).numpy()
        for start in range(0, len(values), _CHUNK):
            part = values[start : start + _CHUNK]
            mask = np.frombuffer(stream.update(bytes(part.nbytes)), "<i8")
            (np.add if sign > 0 else np.subtract)(part, mask, out=part)


def _add_pair_mask(tensors: Tree, client: int, other: int, key: bytes) -> None:
    """Adds a client's half of the mask of a pair; both halves add up to 0."""
    _add_mask(tensors, key, 1 if client < other else -1)


def _check_enough(clients: Iterable[int], threshold: int) -> None:
    if (left := len({*clients})) < threshold:
        raise TooFewError(f"{left} clients are left, but secure aggregation needs {threshold}")


def _ids(clients: Iterable[int]) -> str:
    numbers = [*map(str, sorted(clients))]
    return f"client {numbers[0]}" if len(numbers) == 1 else f"clients {', '.join(numbers)}"


class ClientHalf:
    """A client in one round; it takes each step once, and in this order.

    Args:
        client: its id.
        threshold: how many clients must give their shares to unmask the sum, more than half of the cohort.
        context: names the round; what belongs to another one is refused.
        cohort: the number of clients in a round, by this client's own configuration.
        num_clients: the number of all clients, whose ids count from 0.

    Attributes:
        keys: its public keys of this round.
    """

    def __init__(self, client: int, threshold: int, context: str, cohort: int, num_clients: int) -> None:
        if 2 * threshold <= cohort:
            raise MaskingError(f"the threshold is {threshold}, but must be more than half of the cohort of {cohort}")
        self.client, self.threshold, self.context = client, threshold, context
        self.cohort, self.num_clients = cohort, num_clients
        self._encryption, self._mask = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._seed = secrets.token_bytes(KEY)
        self.keys = PublicKeys(*(key.public_key().public_bytes_raw() for key in (self._encryption, self._mask)))
        self._others: dict[int, PublicKeys] = {}
        self._group = ""  # what all that decrypt each other's shares agree on
        self._shares: dict[int, tuple[bytes, bytes]] = {}  # of the own seed and the mask's key of each client
        self._survivors: list[int] = []
        self._step = 0

    def share(self, keys: Mapping[int, PublicKeys]) -> tuple[dict[int, bytes], bytes]:
        """The shares for each other client, encrypted, and the commitment to the own seed.

        Args:
            keys: the public keys of all clients of the round, this one's among them.
        """
        self._take_step(1)
        if keys.get(self.client) != self.keys:
            raise MaskingError("its own public keys are not those that it has sent")
        _check_enough(keys, self.threshold)
        if len(keys) > self.cohort:
            raise MaskingError(f"{len(keys)} clients have sent keys, but its own configuration allows {self.cohort}")
        if strangers := [client for client in keys if not 0 <= client < self.num_clients]:
            raise MaskingError(f"{_ids(strangers)} is none of {self.num_clients}")
        if len({key for each in keys.values() for key in each}) < 2 * len(keys):
            raise MaskingError("two clients have the same public key")
        of_all = [[client, *(key.hex() for key in keys[client])] for client in sorted(keys)]
        self._group = sha256(json.dumps([self.threshold, self.cohort, of_all]).encode()).hexdigest()
        self._others = {client: each for client, each in keys.items() if client != self.client}
        secrets_of_both = (self._seed, self._mask.private_bytes_raw())
        of_seed, of_key = (split(secret, self.threshold, keys) for secret in secrets_of_both)
        self._shares[self.client] = of_seed[self.client], of_key[self.client]
        encrypted = {
            other: self._cipher(self.client, other).encrypt(bytes(12), of_seed[other] + of_key[other], None)
            for other in self._others
        }
        return encrypted, derived(self._seed, "commitment", self.context, self.client)

    def mask(self, encrypted: Mapping[int, bytes], tensors: Tree) -> Tree:
        """The masked tensors.

        Args:
            encrypted: the shares from each other client that has sent any: those with which this one is masked.
            tensors: integers of 64 bits, contiguous; they are masked in place.
        """
        self._take_step(2)
        if strangers := encrypted.keys() - self._others.keys():
            raise MaskingError(f"{_ids(strangers)} took no part in the step before")
        _check_enough([*encrypted, self.client], self.threshold)
        for other, content in encrypted.items():
            try:
                shares = self._cipher(other, self.client).decrypt(bytes(12), content, None)
            except InvalidTag as error:
                raise MaskingError(f"the shares from client {other} are not what it has sent in this round") from error
            self._shares[other] = shares[:SHARE], shares[SHARE:]
        for other in encrypted:
            key = agreed(self._mask, self._others[other].mask, "mask", self.context, *sorted((self.client, other)))
            _add_pair_mask(tensors, self.client, other, key)
        _add_mask(tensors, derived(self._seed, "own mask", self.context, self.client), 1)
        return tensors

    def confirm(self, survivors: Collection[int]) -> dict[int, bytes]:
        """Takes these clients for the survivors; a code for each other one of them says so.

        Args:
            survivors: the clients whose masked tensors the server has.
        """
        self._take_step(3)
        if strangers := {*survivors} - self._shares.keys():
            raise MaskingError(f"{_ids(strangers)} took no part in the step before")
        if self.client not in survivors:
            raise MaskingError("it has sent its tensors, but is not among the survivors")
        _check_enough(survivors, self.threshold)
        self._survivors = sorted({*survivors})
        return {other: self._code(self.client, other) for other in self._survivors if other != self.client}

    def unmask(self, codes: Mapping[int, bytes]) -> dict[int, bytes]:
        """A share for each client: of the own seed of survivors, of the mask's key of those that have dropped out.

        Never both of the same client: they would unmask what it has sent. Nor anything unless enough clients have named
        the same survivors: different ones could be combined to a sum of fewer.

        Args:
            codes: those that other survivors have sent this one.
        """
        self._take_step(4)
        agree = {sender for sender in self._survivors if sender == self.client or self._has_confirmed(sender, codes)}
        if len(agree) < self.threshold:
            needed = f"{self.threshold} clients that secure aggregation needs"
            raise MaskingError(f"only {len(agree)} of the {needed} have named the same survivors")
        shares, self._shares = self._shares, {}
        return {client: both[client not in self._survivors] for client, both in shares.items()}

    def _take_step(self, step: int) -> None:
        if step != self._step + 1:
            raise MaskingError("each step of a round is taken once, and in order")
        self._step = step

    def _cipher(self, sender: int, receiver: int) -> AESGCM:
        """Encrypts one message, so that the nonce may be 0: both directions have different keys, and so has a round."""
        return AESGCM(self._key("shares", sender, receiver))

    def _has_confirmed(self, sender: int, codes: Mapping[int, bytes]) -> bool:
        """Whether a client has named the same survivors, and had the same shares before."""
        return hmac.compare_digest(codes.get(sender, b""), self._code(sender, self.client))

    def _code(self, sender: int, receiver: int) -> bytes:
        """What a client that takes the same clients for the survivors tells another one."""
        named = json.dumps([sorted(self._shares), self._survivors]).encode()
        return hmac.digest(self._key("survivors", sender, receiver), named, "sha256")

    def _key(self, purpose: str, sender: int, receiver: int) -> bytes:
        """A key that two clients have in common if both were given the same keys of all."""
        other = self._others[receiver if sender == self.client else sender]
        return agreed(self._encryption, other.encryption, purpose, self.context, self._group, sender, receiver)


class ServerHalf:
    """The server in one round: it passes on what clients send each other, adds masked tensors, and unmasks the sum.

    Its clients are fewer after each step; those that are missing in what it is given have dropped out.

    Args:
        threshold: how many clients must be left in each step.
        context: as in :class:`ClientHalf`.
    """

    def __init__(self, threshold: int, context: str) -> None:
        self.threshold, self.context = threshold, context
        self._keys: dict[int, PublicKeys] = {}
        self._commitments: dict[int, bytes] = {}
        self._survivors: list[int] = []
        self._sum: Tree = {}

    def keys(self, keys: Mapping[int, PublicKeys]) -> dict[int, PublicKeys]:
        """What each client gets, from the keys that clients have sent."""
        _check_enough(keys, self.threshold)
        self._keys = dict(sorted(keys.items()))
        return self._keys

    def shares(self, shares: Mapping[int, tuple[Mapping[int, bytes], bytes]]) -> dict[int, dict[int, bytes]]:
        """The encrypted shares for each client, by sender, from those that each has sent, and its commitment."""
        _check_enough(shares, self.threshold)
        self._commitments = {client: commitment for client, (_, commitment) in sorted(shares.items())}
        return {
            client: {sender: shares[sender][0][client] for sender in self._commitments if sender != client}
            for client in self._commitments
        }

    def add(self, masked: Mapping[int, Tree]) -> list[int]:
        """Adds masked tensors; returns the survivors, whom clients are told next."""
        _check_enough(masked, self.threshold)
        self._survivors = sorted(masked)
        for client in self._survivors:
            tree = masked[client]
            self._sum = {name: tensor + self._sum[name] for name, tensor in tree.items()} if self._sum else dict(tree)
        return self._survivors

    def codes(self, codes: Mapping[int, Mapping[int, bytes]]) -> dict[int, dict[int, bytes]]:
        """The codes for each client, by sender, from those that each has sent."""
        _check_enough(codes, self.threshold)
        return {client: {sender: codes[sender][client] for sender in codes if sender != client} for client in codes}

    def unmasked(self, shares: Mapping[int, Mapping[int, bytes]]) -> Tree:
        """The sum of the survivors' tensors, from the shares that each client has given for every client."""
        _check_enough(shares, self.threshold)
        total, chosen = {name: tensor.clone() for name, tensor in self._sum.items()}, sorted(shares)[: self.threshold]
        for client in self._commitments:
            secret = joined({giver: shares[giver][client] for giver in chosen})
            if client in self._survivors:
                if derived(secret, "commitment", self.context, client) != self._commitments[client]:
                    raise MaskingError(f"the shares of client {client}'s own mask do not fit its commitment")
                _add_mask(total, derived(secret, "own mask", self.context, client), -1)
                continue
            private = X25519PrivateKey.from_private_bytes(secret)
            if private.public_key().public_bytes_raw() != self._keys[client].mask:
                raise MaskingError(f"the shares of client {client}'s key do not fit its public key")
            for other in self._survivors:
                key = agreed(private, self._keys[other].mask, "mask", self.context, *sorted((client, other)))
                _add_pair_mask(total, client, other, key)  # the half that has not come
        return total
