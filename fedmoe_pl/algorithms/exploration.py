"""Epsilon-greedy exploration: how often a client picks a random cluster (Isaksson et al. 2022)."""

from __future__ import annotations

import math
from typing import Literal, get_args

from lightning.fabric.utilities.exceptions import MisconfigurationException

Schedule = Literal["constant", "inverse", "power", "by_clusters"]
"""The epsilon of round t, counted from 0, with J clusters: constant, ``1 / (t + 1)``, ``1 / (t + 1)^b`` with the b that
reaches epsilon after ``decay_rounds``, or ``1 / (t + 1)^(2 / J)``."""


def check_schedule(schedule: str, epsilon: float | None, decay_rounds: int | None) -> None:
    """Refuses an unknown schedule, and arguments that are out of range or belong to another schedule.

    Raises:
        MisconfigurationException: if there is one of these.
    """
    if schedule not in get_args(Schedule):
        allowed = ", ".join(get_args(Schedule))
        raise MisconfigurationException(f"EpsilonGreedyIFCA: schedule is '{schedule}', but must be one of {allowed}.")
    if epsilon is not None and not 0 <= epsilon <= 1:
        raise MisconfigurationException(f"EpsilonGreedyIFCA: epsilon is {epsilon}, but must be from 0 to 1.")
    if epsilon is not None and schedule in ("inverse", "by_clusters"):
        raise MisconfigurationException(
            f"EpsilonGreedyIFCA: epsilon is {epsilon}, but must be left out with the schedule '{schedule}'."
        )
    if schedule == "power" and epsilon == 0:
        raise MisconfigurationException(
            f"EpsilonGreedyIFCA: epsilon is {epsilon}, but must be above 0 with the schedule 'power'."
        )
    if decay_rounds is not None and decay_rounds < 1:
        raise MisconfigurationException(f"EpsilonGreedyIFCA: decay_rounds is {decay_rounds}, but must be at least 1.")
    if schedule != "power" and decay_rounds is not None:
        raise MisconfigurationException(
            f"EpsilonGreedyIFCA: decay_rounds is {decay_rounds}, but must be left out with the schedule '{schedule}'."
        )


def probability(
    schedule: str, epsilon: float, decay_rounds: int | None, round: int, num_clusters: int, rounds: int
) -> float:
    """Probability of a random choice in a round.

    Args:
        schedule: how it changes from round to round.
        epsilon: the constant, or what ``power`` reaches.
        decay_rounds: round, counted from 0, in which ``power`` reaches epsilon; None means an eighth of ``rounds``.
        round: the round of the phase, counted from 0.
        num_clusters: number of clusters.
        rounds: the phase's number of rounds.
    """
    if schedule == "constant":
        return epsilon
    exponent = 1.0 if schedule == "inverse" else 2 / num_clusters
    if schedule == "power":
        exponent = -math.log(epsilon) / math.log((rounds / 8 if decay_rounds is None else decay_rounds) + 1)
    return (round + 1) ** -exponent
