"""DP-SGD: Abadi et al., CCS 2016, Algorithm 1 (https://arxiv.org/abs/1607.00133).

================  ==============================  ==================================================================
topic             paper                           here
================  ==============================  ==================================================================
batch             each sample drawn by itself     the same; ``batch_size`` is the expected size
gradient          the sum over the expected       the same, even if the batch is empty
                  batch size
clipping          flat, or per layer              flat, over all parameters that the step trains
steps             plain SGD                       the client's own optimizer
accountant        moments (Renyi)                 Renyi, by Opacus
================  ==============================  ==================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Generator, Tensor
from torch.func import grad, vmap
from torch.utils._pytree import tree_leaves, tree_map

from fedmoe_pl.aggregation.accountant import epsilon
from fedmoe_pl.checks import InvalidArgumentError, check_number
from fedmoe_pl.trees import Tree

_BYTES_AT_ONCE = 2**28  # memory for the gradients of single samples
_LARGE = 2**20  # bytes of a sample's gradient above which a CPU is faster computing one gradient at a time

SampleLoss: TypeAlias = Callable[[Tree, Any], Tensor]


@dataclass
class DPSGD:
    """Protects every single training sample of a client (sample-level differential privacy).

    In every step, the gradient of each sample is clipped, Gaussian noise is added to their sum, and the result is
    divided by the expected number of samples. Whether a sample joins a batch is drawn independently for each sample.

    Args:
        max_grad_norm: the norm to which a sample's gradient, over all parameters that the step trains, is clipped.
        delta: the delta for which epsilon is computed; should be well below one over a client's number of samples.
        noise_multiplier: the standard deviation of the noise, as a multiple of ``max_grad_norm``; with 0 there is no
            noise, and epsilon is infinite. Give either this or ``target_epsilon``.
        target_epsilon: the highest epsilon of a client after all rounds of the phase and of the phases that it starts
            from. Each client's noise multiplier then follows from its number of samples.
    """

    max_grad_norm: float
    delta: float
    noise_multiplier: float | None = None
    target_epsilon: float | None = None

    def __post_init__(self) -> None:
        check_number(self, "max_grad_norm", self.max_grad_norm, above=0)
        check_number(self, "delta", self.delta, above=0, below=1)
        check_number(self, "noise_multiplier", self.noise_multiplier, least=0)
        check_number(self, "target_epsilon", self.target_epsilon, above=0)
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            because = "one of both says how much noise there is"
            raise InvalidArgumentError(
                self, "noise_multiplier", self.noise_multiplier, "given, or target_epsilon in its place", because
            )

    def epsilon(self, steps: Sequence[Sequence[float]]) -> float:
        """The epsilon of some steps; see :func:`accountant.epsilon`."""
        return epsilon(steps, self.delta)


def samples_at_once(parameters: Mapping[str, Tensor]) -> int:
    """For how many samples gradients are computed at once, given the parameters of all clients trained together."""
    size = sum(tensor.nbytes for tensor in parameters.values())
    on_cpu = all(tensor.device.type == "cpu" for tensor in parameters.values())
    return 1 if on_cpu and size > _LARGE else max(_BYTES_AT_ONCE // max(size, 1), 1)


def clipped_sum(loss: SampleLoss, parameters: Tree, samples: Any, max_norm: float, one_by_one: bool = False) -> Tree:
    """The sum over samples of the loss's gradients, each clipped to a norm; gradients that are not finite count as 0.

    Args:
        loss: the loss of a sample, of shape (), given the parameters and a batch that holds only this sample.
        parameters: the tensors to differentiate by.
        samples: tensors of shape (n, ...), perhaps in tuples and dicts.
        max_norm: the norm to which a gradient over all parameters is clipped.
        one_by_one: whether gradients are computed one after another, without ``vmap``.
    """
    sums, size = zeros(parameters), 1 if one_by_one else samples_at_once(parameters)
    first = tree_leaves(samples)[0]
    counts = first.new_ones(len(first), dtype=torch.bool)
    with torch.no_grad():
        for start in range(0, len(first) if sums else 0, size):
            part = slice(start, start + size)
            rows = tree_map(lambda tensor: tensor[part], samples)  # noqa: B023
            gradients = (_gradient_of_one if size == 1 else sample_gradients)(loss, parameters, rows)
            add_clipped(sums, gradients, counts[part], max_norm)
    return sums


def zeros(parameters: Tree) -> Tree:
    """Zeros of the parameters' shapes, in contiguous memory."""
    return {name: torch.zeros_like(each, memory_format=torch.contiguous_format) for name, each in parameters.items()}


def sample_gradients(loss: SampleLoss, parameters: Tree, samples: Any) -> Tree:
    """The gradients of single samples, shape (n, ...), for the arguments of :func:`clipped_sum`."""

    def of_one(parameters: Tree, sample: Any) -> Tensor:
        return loss(parameters, tree_map(lambda tensor: tensor[None], sample))

    return vmap(grad(of_one), in_dims=(None, 0), randomness="different")(parameters, samples)


def _gradient_of_one(loss: SampleLoss, parameters: Tree, sample: Any) -> Tree:
    """Like :func:`sample_gradients` for a batch of one; ``torch.func.grad`` keeps a graph and takes twice as long."""
    leaves = {name: parameter.detach().requires_grad_() for name, parameter in parameters.items()}
    with torch.enable_grad():
        found = torch.autograd.grad(loss(leaves, sample), [*leaves.values()], materialize_grads=True)
    return {name: gradient[None] for name, gradient in zip(leaves, found, strict=True)}


def add_clipped(sums: Tree, gradients: Tree, counts: Tensor, max_norm: float) -> None:
    """Adds clipped gradients to sums, in place: copying a large model's gradients would cost more than computing them.

    Args:
        sums: the sums of one client, or of several along the first axis.
        gradients: the gradients for n samples of each client, shape (n, ...) or (clients, n, ...).
        counts: each sample's weight, such as 0 for padding, shape (n,) or (clients, n).
        max_norm: the norm to which a gradient over all parameters is clipped.
    """
    counts = counts.view(-1, counts.shape[-1])
    rows = {name: each.reshape(*counts.shape, -1) for name, each in gradients.items()}
    norms = torch.stack([torch.linalg.vector_norm(each, dim=2) for each in rows.values()])
    norm = torch.linalg.vector_norm(norms, dim=0)  # (clients, n)
    is_finite = norm.isfinite()
    if not is_finite.all():  # nan times 0 is nan
        rows = {name: torch.where(is_finite[:, :, None], each, 0) for name, each in rows.items()}
    factors = torch.where(is_finite, (max_norm / norm).clamp(max=1), 0) * counts
    for name, each in rows.items():
        sums[name].view(len(each), 1, -1).baddbmm_(factors[:, None], each)


def noisy_mean(sums: Tree, expected: float, max_norm: float, noise_multiplier: float, generator: Generator) -> Tree:
    """The gradient of a step: the sum of clipped gradients plus noise, divided by the expected number of samples."""
    return {
        name: (total + _noise(total, noise_multiplier * max_norm, generator)) / expected for name, total in sums.items()
    }


def _noise(like: Tensor, std: float, generator: Generator) -> Tensor | float:
    """Noise with a tensor's shape and data type, drawn on the CPU so that it is the same on every device."""
    if not std:
        return 0.0
    return (std * torch.randn(like.shape, generator=generator, dtype=like.dtype)).to(like.device)
