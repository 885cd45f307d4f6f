"""What a federation does when clients fail, or drop out."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from fedmoe_pl.aggregation import Aggregation, SecureAggregation
from fedmoe_pl.backends import Failure
from fedmoe_pl.checks import InvalidArgumentError, check_at_least, check_choice, check_number, is_finite
from fedmoe_pl.data import ClientNames
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.seeds import Purpose, derive_seed

RETRIES = 3
"""How often a round is tried again, with another cohort, after too few clients answered."""


class ClientError(RuntimeError):
    """The training of clients failed; the message names the phase, the round and the client first."""


class RoundWarning(UserWarning):
    """A warning of a round; ``without_round`` is what it has in common with those of other rounds."""

    def __init__(self, phase: Phase, round: int, text: str) -> None:
        super().__init__(f"{phase}, round {round}: {text}")
        self.without_round = f"{phase}: {text}"


@dataclass(frozen=True)
class ClientFailures:
    """What a federation does when clients fail, or drop out.

    A client fails if its training raises an exception, gives weights that are not finite, takes too long, or ends its
    worker process three times. Then its update does not count, it keeps what it kept before, and a warning says why.

    Args:
        action: ``skip`` goes on without clients that fail; ``raise`` stops the run.
        min_clients: how many clients of a round must answer; if fewer do, what was computed is discarded, and the
            round is tried again with other clients, at most three times. None for one. If the phase's aggregation
            needs more, such as 2 f + 3 for ``MultiKrum``, so many must answer.
        timeout: seconds that a client's training may take in a round; None for any. Clients that train stacked share
            their seconds. A client in an operation that Python cannot interrupt goes on; its worker process, if it has
            one, is ended a minute later.
        dropout: the probability with which a client drops out before its training, for experiments. It is counted, but
            no warning names it. At least one client stays, but with ``DifferentialPrivacy`` all may drop out.
        max_change: a client of a deployed federation fails if its update's change is more than so many times as long
            as the median of the others in its round, and as what the client received.

    Raises:
        InvalidArgumentError: if an argument is out of range.
    """

    action: Literal["skip", "raise"] = "skip"
    min_clients: int | None = None
    timeout: float | None = None
    dropout: float = 0.0
    max_change: float = 1000.0

    def __post_init__(self) -> None:
        """Checks the arguments."""
        check_choice(self, "action", self.action, ("skip", "raise"))
        check_at_least(self, "min_clients", self.min_clients, 1)
        check_number(self, "timeout", self.timeout, above=0)
        if not (is_finite(self.dropout) and 0 <= self.dropout < 1):
            raise InvalidArgumentError(self, "dropout", self.dropout, "at least 0 and below 1")
        if not (isinstance(self.max_change, int | float) and self.max_change > 1):
            raise InvalidArgumentError(self, "max_change", self.max_change, "a number above 1")

    def check_thread(self) -> None:
        """Refuses a time limit where Python or the system cannot keep it."""
        if self.timeout is not None and threading.current_thread() is not threading.main_thread():
            because = "only the main thread can be interrupted"
            raise InvalidArgumentError(self, "timeout", self.timeout, "left out outside of the main thread", because)
        if self.timeout is not None and not hasattr(signal, "SIGALRM"):
            because = "the system has no SIGALRM, which ends a client's training; Linux and macOS do"
            raise InvalidArgumentError(self, "timeout", self.timeout, "left out here", because)

    def dropped(self, cohort: Sequence[int], seed: int, round: int, attempt: int, one_stays: bool = True) -> list[int]:
        """The clients that drop out before their training, each with the same probability.

        Without ``one_stays``, a client's draw follows from its id alone, whoever else is in the cohort.
        """
        if not self.dropout or not cohort:
            return []
        rng = np.random.default_rng(derive_seed(seed, Purpose.DROPOUT, round, attempt))
        draws = rng.random(max(cohort) + 1)[[*cohort]]
        if one_stays:
            draws[draws.argmax()] = 1
        return [client for client, draw in zip(cohort, draws, strict=True) if draw < self.dropout]

    def needed(
        self, aggregation: Aggregation | None, secure: SecureAggregation | None, cohort_size: int = 0
    ) -> tuple[int, str]:
        """How many clients of a cohort must answer, and why; its size counts where ``secure`` has no threshold yet."""
        least = self.min_clients or 1
        if secure is not None:  # it refuses a higher min_clients
            return secure.needed(cohort_size), f"secure aggregation needs {secure.needed(cohort_size)}"
        if aggregation is not None and aggregation.min_clients > least:
            return aggregation.min_clients, f"{type(aggregation).__name__} needs {aggregation.min_clients}"
        return least, f"min_clients is {least}"

    def stop(self, phase: Phase, round: int, failed: Mapping[int, Failure], names: ClientNames) -> None:
        """Stops the run if a client failed where none may; from the exception in the first client's training."""
        if self.action == "raise" and failed:
            client, failure = min(failed.items(), key=lambda item: item[0])
            raise client_error(f"{phase}, round {round}, client {names[client]}: {failure.reason}", failure)

    def report(self, phase: Phase, round: int, failed: Mapping[int, Failure], names: ClientNames) -> None:
        """Warns of clients that failed, once for each reason."""
        clients: dict[str, list[int]] = {}
        for client in sorted(failed):
            clients.setdefault(failed[client].reason, []).append(client)
        for reason, ids in clients.items():
            who = f"{names.text(ids)} {'is' if len(ids) == 1 else 'are'}"
            rank_zero_warn(RoundWarning(phase, round, f"{who} left out: {reason}"))


def client_error(message: str, failure: Failure | None) -> ClientError:
    """An exception with the failed client's own as its cause, and the traceback in the worker as the cause of that."""
    error = ClientError(message)
    if failure is not None and failure.error is not None:
        error.__cause__ = failure.error
        if failure.trace:
            failure.error.__cause__ = RuntimeError(f"in the worker process:\n{failure.trace}")
    return error
