"""Decides whether two results differ only by rounding errors, and has devices compute in full precision."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

_OF_GPU = ("cuda.matmul", "cudnn.conv", "cudnn.rnn")
_OF_CPU = ("mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
_NOISE = 100  # the largest error of a sum, in multiples of the rounding error of its largest value
_MOST = 0.05  # the largest relative error, where half precision would allow any


def precisions(exact: bool = False) -> list[Callable[[], None]]:
    """The settings that let a device round the factors of products to 11 bits (TF32) or 8, as calls that apply them.

    They are as they are now in this process or, if ``exact``, such that nothing is rounded.
    """
    of_cpu = [_precision(operation, exact) for operation in _OF_CPU]
    try:
        with _silent():
            products, convolutions = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        products = partial(_set_products, "highest" if exact else products)
        return [products, partial(set_backend, "cudnn.allow_tf32", convolutions and not exact), *of_cpu]
    except RuntimeError:  # raised if the user has set the ``fp32_precision`` attributes that replace them
        return [*(_precision(operation, exact) for operation in _OF_GPU), *of_cpu]


def _precision(operation: str, exact: bool) -> Callable[[], None]:
    path = f"{operation}.fp32_precision"
    return partial(set_backend, path, "ieee" if exact else attrgetter(path)(torch.backends))


def set_backend(path: str, value: Any) -> None:
    """Sets the attribute at a dotted path below ``torch.backends``."""
    owner, _, name = path.rpartition(".")
    with _silent():
        setattr(attrgetter(owner)(torch.backends), name, value)


def _set_products(value: str) -> None:
    with _silent():
        torch.set_float32_matmul_precision(value)


@contextmanager
def _silent() -> Iterator[None]:
    """Suppresses torch's advice to use its new settings."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Please use the new API settings to control TF32")
        yield


@contextmanager
def in_full_precision() -> Iterator[None]:
    """In this context, no factors are rounded in the whole process."""
    before = precisions()
    try:
        for set_exact in precisions(exact=True):
            set_exact()
        yield
    finally:
        for restore in before:
            restore()


def is_close(a: Tensor | None, b: Tensor | None, largest_of_all: float = 0.0) -> bool:
    """Whether two results of one computation, done in two ways, differ only by rounding errors.

    The tolerance is larger on a GPU, whose algorithm for a convolution depends on the batch size.
    """
    if a is None or b is None or a.shape != b.shape:
        return a is b
    if not a.is_floating_point():
        return torch.equal(a, b)
    relative = 1e-2 if a.device.type == "cuda" else min(1000 * torch.finfo(a.dtype).eps, _MOST)
    largest = largest_value([b])
    noise = min(_NOISE * torch.finfo(a.dtype).eps, _MOST) * largest_of_all
    return torch.allclose(a, b, rtol=0, atol=max(relative * max(largest, 1e-3), noise), equal_nan=True)


def largest_value(tensors: Iterable[Tensor | None]) -> float:
    """The largest finite absolute value in some tensors; 0 if there is none."""
    values = [tensor.abs().nan_to_num(0, 0).max().item() for tensor in tensors if tensor is not None and tensor.numel()]
    return max(values, default=0.0)


def equal_to_rounding(a: Tensor, b: Tensor) -> bool:
    """Whether two results of the same operations differ by at most a few rounding errors of the largest value."""
    relative = 100 * torch.finfo(a.dtype).eps
    return bool(((a - b).abs() <= relative * b.abs().max()).all())
