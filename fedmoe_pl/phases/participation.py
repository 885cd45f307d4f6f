"""Which clients take part in a round, and which are evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from fedmoe_pl.aggregation.aggregation import Cohort
from fedmoe_pl.algorithms.consent import floor_of_share
from fedmoe_pl.phases.phase import Phase
from fedmoe_pl.seeds import Purpose, derive_seed, generator_of, phase_seed


def cohort_size(num_clients: int, clients_per_round: int | float | None) -> int:
    """Number of clients in a round.

    Example:
        >>> cohort_size(100, 0.1), cohort_size(100, 7), cohort_size(100, 1), cohort_size(100, 1.0), cohort_size(4, 0.1)
        (10, 7, 1, 100, 1)
    """
    if clients_per_round is None:
        return num_clients
    if isinstance(clients_per_round, float):
        return max(floor_of_share(clients_per_round, num_clients), 1)
    return clients_per_round


def sample_cohort(ids: Sequence[int], size: int, seed: int, round: int, attempt: int = 0) -> list[int]:
    """Draws ``size`` clients uniformly without replacement; the random numbers depend on (seed, round, attempt) only.

    Example:
        >>> sample_cohort(range(4), 4, seed=0, round=0)
        [0, 1, 2, 3]
        >>> sample_cohort(range(100), 3, seed=0, round=5) == sample_cohort(range(100), 3, seed=0, round=5)
        True
    """
    rng = np.random.default_rng(derive_seed(seed, Purpose.COHORT, round, *([attempt] if attempt else [])))
    chosen = np.sort(rng.choice(len(ids), size, replace=False))
    return [ids[i] for i in chosen]


def sample_poisson(ids: Sequence[int], expected: int, seed: int, round: int, attempt: int = 0) -> list[int]:
    """Draws for each client whether it joins the round; the random numbers depend on (seed, round, attempt) only.

    Example:
        >>> sample_poisson(range(3), 3, seed=0, round=0), sample_poisson(range(6), 2, seed=0, round=2)
        ([0, 1, 2], [4])
    """
    rng = np.random.default_rng(derive_seed(seed, Purpose.COHORT, round, *([attempt] if attempt else [])))
    return _joining(ids, expected, rng.random(len(ids)))


def _joining(ids: Sequence[int], expected: int, draws: Iterable[float]) -> list[int]:
    """The clients whose draws, uniform in [0, 1), let them join."""
    return [client for client, draw in zip(ids, draws, strict=True) if draw * len(ids) < expected]


def cohort_of(phase: Phase, num_clients: int, seed: int) -> Cohort:
    """The number of clients in each round of a phase, and those that they are drawn from.

    A share below 1 counts all clients, not only the participants.
    """
    participants = phase.algorithm.opt_out.participants(range(num_clients), seed)
    if phase.clients is not None:
        chosen = {*phase.clients}
        participants = [client for client in participants if client in chosen]
    size = phase.clients_per_round
    all_of_them = size is None or (isinstance(size, float) and size == 1)
    return Cohort(len(participants) if all_of_them else cohort_size(num_clients, size), participants)


def phase_cohort(
    phase: Phase, num_clients: int, seed: int, round: int, attempt: int = 0, secret: int | None = None
) -> list[int]:
    """Draws the clients of a round from the participants, as the phase's aggregation needs it.

    With a ``secret``, cohorts of Poisson sampling follow from it in place of the seed.
    """
    cohort = cohort_of(phase, num_clients, seed)
    if phase.aggregation is not None and phase.aggregation.poisson_sampling:
        # a phase may start from two others, whose epsilons add up only if their cohorts are drawn independently
        if secret is not None:
            generator = generator_of(secret, Purpose.COHORT, phase.name, round, attempt)
            draws = torch.rand(len(cohort.participants), generator=generator, dtype=torch.float64)
            return _joining(cohort.participants, cohort.size, draws.tolist())
        return sample_poisson(cohort.participants, cohort.size, phase_seed(seed, phase.name), round, attempt)
    return sample_cohort(cohort.participants, cohort.size, seed, round, attempt)


def evaluated_clients(num_clients: int, number: int | None, seed: int) -> list[int]:
    """The clients that are evaluated, the same in all rounds and phases; the draw depends on the seed only.

    Example:
        >>> evaluated_clients(3, None, seed=0), len(evaluated_clients(100, 20, seed=0))
        ([0, 1, 2], 20)
    """
    if number is None:
        return [*range(num_clients)]
    rng = np.random.default_rng(derive_seed(seed, Purpose.EVALUATED))
    return np.sort(rng.choice(num_clients, number, replace=False)).tolist()
