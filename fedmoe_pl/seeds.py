"""Seeds that depend on their purpose only, never on what ran before."""

from __future__ import annotations

import functools
import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from zlib import crc32

import numpy as np
import torch

_WORDS, _FIRST = 624, 24  # of a CPU generator's state, a Mersenne twister: its words, and the first one's byte


class Purpose:
    """What random numbers are for: the key after the run's seed in ``derive_seed`` and ``generator_of``.

    Methods of the package have numbers from 70 to 99, each in its file; initial parameters and phases have names.
    """

    TRAINING = 0  # the global generators of a client's training: dropout, a user's code
    COHORT = 1  # of a round
    SPLIT = 2  # of a client's samples
    BATCHES = 3  # of a client
    DROPOUT = 5  # of clients
    OPT_OUT = 7  # of clients and of their samples
    EVALUATED = 8  # clients
    NOISE = 9  # of aggregations
    SHARE_OF_BATCH = 11  # of a process, with ddp
    PRIVATE_BATCHES = 12  # with ``sample_privacy``
    PRIVATE_NOISE = 13


def derive_seed(seed: int, *keys: int) -> int:
    """Derives a 63-bit seed from a run's seed and any number of non-negative keys, such as (client, round).

    Example:
        >>> derive_seed(0, 3, 1) == derive_seed(0, 3, 1) != derive_seed(0, 1, 3)
        True
    """
    return int(np.random.SeedSequence((seed, *keys)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def named_seed(seed: int, *names: str) -> int:
    """Derives the 63-bit seed of initial parameters from a run's seed and their names, such as a phase and its gate.

    Of 2^32 names, two have the same checksum: they have the same initial parameters. What must differ for any two
    names, such as cohorts and noise, follows from ``phase_seed`` and ``generator_of``.
    """
    return derive_seed(seed, *(crc32(name.encode()) for name in names))


def phase_seed(seed: int, name: str) -> int:
    """Derives a 63-bit seed from a run's seed and a hash of the whole name of a phase."""
    return int.from_bytes(_hash(seed, name, size=8), "little") >> 1


def generator_of(seed: int, *keys: int | str) -> torch.Generator:
    """A generator whose whole state follows from a hash of all of a seed, which may have any length, and of the keys.

    ``Generator.manual_seed`` uses 32 bits on a CPU, which can be found by trying all of them.

    Example:
        >>> one, other = (torch.randn(1, generator=generator_of(seed, 3)).item() for seed in (5, 5 + 2**100))
        >>> one != other
        True
    """
    generator = torch.Generator()
    state = generator.get_state()
    words = np.frombuffer(_hash(seed, *keys, size=4 * _WORDS), "<u4")
    state[_FIRST : _FIRST + 8 * _WORDS].numpy().view(np.uint64)[:] = words
    return generator.set_state(state)


def _hash(*keys: int | str, size: int) -> bytes:
    return hashlib.shake_256("\0".join(map(str, keys)).encode()).digest(size)


def seed_all(seed: int) -> None:
    """Seeds the global generators of torch, NumPy and Python (dropout, parameter initialization, user code)."""
    # torch.manual_seed does the same, but takes 2 ms where CUDA has not been used, to note where it was called
    torch.default_generator.manual_seed(seed % 2**63)
    if _has_cuda():
        torch.cuda.manual_seed_all(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """In this context, the global generators of torch's CPU, NumPy and Python start from a seed; then they go on."""
    torch_state, numpy_state, python_state = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)


@functools.cache
def _has_cuda() -> bool:
    return torch.cuda.is_available()  # loads the driver's library each time
