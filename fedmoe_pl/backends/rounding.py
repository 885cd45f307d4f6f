"""Whether two ways to compute the same differ by rounding only."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

_NOISE = 100  # roundings of the largest value that a sum of such values may be off by


def is_close(a: Tensor | None, b: Tensor | None, largest_of_all: float = 0.0) -> bool:
    """Whether two ways to compute the same differ by rounding only.

    A GPU may round the factors of a convolution, so that more is allowed there.

    Args:
        a: one result.
        b: the other.
        largest_of_all: the largest absolute value that was computed along with them. Where the exact result is zero,
            such as the gradient of a bias before a normalization, ``a`` and ``b`` are only what rounding such values
            has left.
    """
    if a is None or b is None or a.shape != b.shape:
        return a is b
    if not a.is_floating_point():
        return torch.equal(a, b)
    relative = 1e-2 if a.device.type == "cuda" else 1000 * torch.finfo(a.dtype).eps
    largest = largest_value([b])
    noise = _NOISE * torch.finfo(a.dtype).eps * largest_of_all
    return torch.allclose(a, b, rtol=0, atol=max(relative * max(largest, 1e-3), noise), equal_nan=True)


def largest_value(tensors: Iterable[Tensor | None]) -> float:
    """The largest finite absolute value in some tensors; 0 if there is none."""
    values = [tensor.abs().nan_to_num(0, 0).max().item() for tensor in tensors if tensor is not None and tensor.numel()]
    return max(values, default=0.0)


def equal_to_rounding(a: Tensor, b: Tensor) -> bool:
    """Whether one result differs from another of the same operations by a few roundings of its largest value."""
    relative = 100 * torch.finfo(a.dtype).eps
    return bool(((a - b).abs() <= relative * b.abs().max()).all())
