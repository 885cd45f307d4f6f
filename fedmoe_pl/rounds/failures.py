"""What a federation does when clients fail, or drop out."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from typing import Literal, get_args

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn

from fedmoe_pl.aggregation import Aggregation
from fedmoe_pl.backends import Failure
from fedmoe_pl.rounds.phase import Phase
from fedmoe_pl.seeds import derive_seed

OnClientFailure = Literal["skip", "raise"]
"""What happens when a client fails: the others go on without it, or the run stops."""
RETRIES = 3
"""How often a round is tried again, with another cohort, after too few clients answered."""
_DROPOUT = 5  # separates the random numbers of simulated dropout from those of cohorts and others


class ClientError(RuntimeError):
    """The training of clients failed; the message names the phase, the round and the client first."""


class ClientFailures:
    """What a federation does when clients fail, or drop out; the arguments are those of ``Federation``.

    A client fails if its training raises an exception, gives weights that are not finite, takes too long, or ends its
    worker process three times. Then its update does not count, it keeps what it kept before, and a warning says why.

    Args:
        on_client_failure: ``skip`` goes on without clients that fail; ``raise`` stops the run.
        min_clients: how many clients must answer for a round to count; otherwise, what was computed is forgotten, and
            the round is tried again with other clients, at most three times. None for one. If the phase's aggregation
            needs more, such as 2 f + 3 for ``MultiKrum``, so many must answer.
        client_timeout: seconds that a client's training may take in a round; None for any. Clients that train stacked
            share their seconds. A client in an operation that Python cannot interrupt goes on; its worker process, if
            it has one, is ended a minute later.
        dropout: the probability with which a client drops out before its training, for experiments. It is counted, but
            no warning names it. At least one client stays, but with ``DifferentialPrivacy`` all may drop out.
        max_change: how many times longer than usual the change that a client of a deployed federation sends may be;
            see ``deployment.proportions``.

    Raises:
        MisconfigurationException: if an argument is out of range, or two contradict each other.
    """

    def __init__(
        self,
        on_client_failure: OnClientFailure = "skip",
        min_clients: int | None = None,
        client_timeout: float | None = None,
        dropout: float = 0.0,
        max_change: float = 1000.0,
    ) -> None:
        if on_client_failure not in get_args(OnClientFailure):
            raise MisconfigurationException(
                f"Federation: on_client_failure is '{on_client_failure}', but must be skip or raise."
            )
        if min_clients is not None and min_clients < 1:
            raise MisconfigurationException(f"Federation: min_clients is {min_clients}, but must be at least 1.")
        if client_timeout is not None and not 0 < client_timeout < math.inf:
            raise MisconfigurationException(
                f"Federation: client_timeout is {client_timeout}, but must be a finite number of seconds above 0."
            )
        if not 0 <= dropout < 1:
            raise MisconfigurationException(f"Federation: dropout is {dropout}, but must be at least 0 and below 1.")
        if not max_change > 1:
            raise MisconfigurationException(f"Federation: max_change is {max_change}, but must be above 1.")
        if on_client_failure == "raise" and min_clients is not None and not dropout:
            raise MisconfigurationException(
                f"Federation: min_clients is {min_clients}, but must be left out with on_client_failure 'raise' and "
                "without dropout, because then all clients answer."
            )
        self.on_client_failure = on_client_failure
        self.min_clients = min_clients or 1
        self.client_timeout = client_timeout
        self.dropout = dropout
        self.max_change = max_change

    def check_thread(self) -> None:
        """Refuses a time limit where Python cannot keep it.

        Raises:
            MisconfigurationException: if there is one outside of the main thread.
        """
        if self.client_timeout is not None and threading.current_thread() is not threading.main_thread():
            raise MisconfigurationException(
                f"Federation: client_timeout is {self.client_timeout}, but must be left out where fit runs outside of "
                "the main thread, because only the main thread can be interrupted."
            )

    def check_cohort(self, phase: Phase, size: int) -> None:
        """Refuses cohorts from which fewer clients than ``min_clients`` could ever answer.

        Args:
            phase: the phase.
            size: how many clients train in each of its rounds.

        Raises:
            MisconfigurationException: if there are fewer.
        """
        if self.min_clients > size:
            raise MisconfigurationException(
                f"Federation: min_clients is {self.min_clients}, but must be at most {size}, the number of clients in "
                f"a round of '{phase.name}'."
            )

    def dropped(self, cohort: Sequence[int], seed: int, round: int, attempt: int, one_stays: bool = True) -> list[int]:
        """The clients that drop out before their training, each with the same probability.

        Without ``one_stays``, a client's draw follows from its id alone, whoever else is in the cohort.

        Args:
            cohort: the clients of the round.
            seed: the run's seed.
            round: the round, counted from 0 along the chain of phases that start from one another.
            attempt: how often the round was tried before.
            one_stays: whether the client with the highest draw never drops out.
        """
        if not self.dropout or not cohort:
            return []
        draws = np.random.default_rng(derive_seed(seed, _DROPOUT, round, attempt)).random(max(cohort) + 1)[[*cohort]]
        if one_stays:
            draws[draws.argmax()] = 1
        return [client for client, draw in zip(cohort, draws, strict=True) if draw < self.dropout]

    def needed(self, aggregation: Aggregation | None) -> tuple[int, str]:
        """How many clients of a round must answer, and why."""
        if aggregation is not None and aggregation.min_clients > self.min_clients:
            return aggregation.min_clients, f"{type(aggregation).__name__} needs {aggregation.min_clients}"
        return self.min_clients, f"min_clients is {self.min_clients}"

    def stop(self, phase: Phase, round: int, failed: Mapping[int, Failure]) -> None:
        """Stops the run if a client failed where none may; arguments as in :meth:`report`.

        Raises:
            ClientError: if ``on_client_failure`` is ``raise``; from the exception in the first client's training.
        """
        if self.on_client_failure == "raise":
            for client, failure in sorted(failed.items(), key=lambda item: item[0]):
                raise client_error(f"{phase}, round {round}, client {client}: {failure.reason}", failure)

    def report(self, phase: Phase, round: int, failed: Mapping[int, Failure]) -> None:
        """Warns of clients that failed, once for each reason.

        Args:
            phase: the phase.
            round: the round, counted from 1.
            failed: why clients failed, by client.
        """
        clients: dict[str, list[int]] = {}
        for client in sorted(failed):
            clients.setdefault(failed[client].reason, []).append(client)
        for reason, ids in clients.items():
            who = f"client {ids[0]} is" if len(ids) == 1 else f"clients {', '.join(map(str, ids))} are"
            rank_zero_warn(f"{phase}, round {round}: {who} left out: {reason}")


def client_error(message: str, failure: Failure | None) -> ClientError:
    """An exception with the failed client's own as its cause, and the traceback in the worker as the cause of that."""
    error = ClientError(message)
    if failure is not None and failure.error is not None:
        error.__cause__ = failure.error
        if failure.trace:
            failure.error.__cause__ = RuntimeError(f"in the worker process:\n{failure.trace}")
    return error
