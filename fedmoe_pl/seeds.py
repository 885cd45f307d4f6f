"""Seeds that depend on their purpose only, never on what ran before."""

from __future__ import annotations

import functools
import random

import numpy as np
import torch


def derive_seed(seed: int, *keys: int) -> int:
    """Derives a 63-bit seed from a run's seed and any number of non-negative keys, such as (client, round).

    Example:
        >>> derive_seed(0, 3, 1) == derive_seed(0, 3, 1) != derive_seed(0, 1, 3)
        True
    """
    return int(np.random.SeedSequence((seed, *keys)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def seed_all(seed: int) -> None:
    """Seeds the global generators of torch, NumPy and Python (dropout, parameter initialization, user code)."""
    # torch.manual_seed does the same, but takes 2 ms where CUDA has not been used, to note where it was called
    torch.default_generator.manual_seed(seed)
    if _has_cuda():
        torch.cuda.manual_seed_all(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()  # loads the driver's library each time
