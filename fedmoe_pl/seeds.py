"""Randomness that depends on what it is for, never on what ran before."""

from __future__ import annotations

import random

import numpy as np
import torch


def derive_seed(seed: int, *keys: int) -> int:
    """A seed of 63 bits from a run's seed and any number of non-negative keys, such as (client, round).

    Example:
        >>> derive_seed(0, 3, 1) == derive_seed(0, 3, 1) != derive_seed(0, 1, 3)
        True
    """
    return int(np.random.SeedSequence((seed, *keys)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_all(seed: int) -> None:
    """Seeds the global generators of torch, NumPy and Python (dropout, parameter initialization, user code)."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
