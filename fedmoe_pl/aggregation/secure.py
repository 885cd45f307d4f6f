"""Secure aggregation: clients send integers, of which the server needs only the sum.

Here is the arithmetic, the same in a simulation and in a deployed federation. The masks that hide the integers cancel
exactly in their sum, so that a simulation leaves them out; ``deployment.secure`` has them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.checks import check_at_least
from fedmoe_pl.trees import same_values

_RANGE = 2.0**62  # of the sum, half of what 64 bits hold


class OutOfRangeError(ValueError):
    """A value of a client's update that the integers cannot express."""


@dataclass
class SecureAggregation:
    """The server learns the weighted sum of a round's updates, and no single one (``Phase.secure_aggregation``).

    A client multiplies the change of each shared tensor by the weight of its update, and rounds it to an integer of 64
    bits with ``fraction_bits`` binary digits after the point. In a deployed federation, masks hide these integers from
    the server (Bonawitz et al., CCS 2017, https://eprint.iacr.org/2017/281); they cancel in the sum. A round whose sum
    fewer than ``threshold`` clients could unmask is tried again, and nothing of it is unmasked.

    A client whose value times its weight is not below ``2 ** (62 - fraction_bits)`` over the number of all clients
    fails in that round, because the sum could overflow. Rounding changes a mean by less than ``2 ** -fraction_bits``.

    Args:
        threshold: the number of clients that must stay in a round, more than half of its cohort; None is the smallest
            number above two thirds of it.
        fraction_bits: binary digits after the point.
    """

    threshold: int | None = None
    fraction_bits: int = 32

    def __post_init__(self) -> None:
        """Checks the arguments."""
        check_at_least(self, "threshold", self.threshold, 2)
        check_at_least(self, "fraction_bits", self.fraction_bits, 1, 52)

    def needed(self, cohort_size: int) -> int:
        """How many clients of a cohort must stay in a round.

        Example:
            >>> [SecureAggregation().needed(size) for size in (1, 2, 3, 5, 6, 100)]
            [2, 2, 3, 4, 5, 67]
        """
        return max(2 * cohort_size // 3 + 1, 2) if self.threshold is None else self.threshold

    def encoded(self, update: Update, start: Mapping[str, Tensor], num_clients: int) -> Update:
        """The update as integers.

        Args:
            update: what the client would send.
            start: tensors from which those of the same name have changed; the others are encoded as they are.
            num_clients: the number of all clients, whose sum must not overflow.

        Raises:
            OutOfRangeError: if a value is not finite or too large.
        """
        sent = {
            name: self._integers(name, tensor, start.get(name), update.weight, num_clients)
            for name, tensor in update.sent.items()
        }
        return Update(sent, update.weight, update.state)

    def _integers(self, name: str, tensor: Tensor, start: Tensor | None, weight: float, num_clients: int) -> Tensor:
        if start is not None and same_values(tensor, start):  # also infinite ones, as in a mask
            return torch.zeros(tensor.shape, dtype=torch.int64)
        values = tensor.double() if start is None else tensor.double() - start.double()
        scaled = (values * weight * 2.0**self.fraction_bits).round()
        if not bool((scaled.abs() < (most := _RANGE / num_clients)).all()):  # also of nan
            limit = most / 2.0**self.fraction_bits
            raise OutOfRangeError(
                f"its {name} times its weight, {weight:g}, has values of {limit:.3g} or more, or none that are finite, "
                "which secure_aggregation.fraction_bits leaves no room for"
            )
        return scaled.long().contiguous()

    def combine(self, a: Update, b: Update) -> Update:
        """The sum of both, which is exact, in whatever order."""
        return Update({name: tensor + b.sent[name] for name, tensor in a.sent.items()}, a.weight + b.weight)

    def decoded(self, combined: Update, server: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> Update:
        """The weighted mean in place of the sum of integers.

        Args:
            combined: the sum of what clients have encoded.
            server: the server's tensors, which give the data types.
            start: those from which clients' tensors have changed, by the names that ``encoded`` was given.
        """
        sent = {}
        for name, total in combined.sent.items():
            before = start.get(name)
            if before is not None and not total.any():
                sent[name] = before  # in every bit, and the same memory
                continue
            mean = total.double() / (2.0**self.fraction_bits * combined.weight)
            mean = mean if before is None else before.double() + mean
            sent[name] = mean.to(server[name].dtype) if name in server else mean
        return Update(sent, combined.weight)
