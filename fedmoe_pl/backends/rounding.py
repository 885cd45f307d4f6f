"""Decides whether two results differ by rounding errors only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_NOISE = 100  # largest error of a sum, in rounding errors of its largest value


@contextmanager
def in_full_precision() -> Iterator[None]:
    """In this context, a GPU does not round the factors of single-precision products to 11 bits (TF32)."""
    convolutions, products = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = convolutions
        torch.set_float32_matmul_precision(products)


def is_close(a: Tensor | None, b: Tensor | None, largest_of_all: float = 0.0) -> bool:
    """Whether two results of the same computation, done in two ways, differ by rounding errors only.

    The tolerance is larger on a GPU, whose algorithm for a convolution depends on the size of a batch.
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
    """Whether two results of the same operations differ by at most a few rounding errors of the largest value."""
    relative = 100 * torch.finfo(a.dtype).eps
    return bool(((a - b).abs() <= relative * b.abs().max()).all())
