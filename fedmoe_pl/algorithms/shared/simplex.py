"""Quadratic programs over the simplex."""

from __future__ import annotations

import torch
from torch import Tensor

_RIDGE = 1e-13  # relative to the mean of the diagonal; makes singular matrices regular


def simplex_minimum(matrix: Tensor) -> Tensor:
    """The weights a >= 0 (n,) with sum 1 that minimize ``a^T P a``, by an active-set method in float64.

    The weights outside the active set are 0. Inside, the minimum on the plane sum(a) = 1 is in closed form. If it has
    negative weights, the first one that gets to 0 on the way there leaves the set; otherwise the index whose weight
    would lower the value most enters. It ends after finitely many steps, because the value falls with each set.

    Example:
        >>> simplex_minimum(torch.tensor([[1.0, 0.0], [0.0, 3.0]]))
        tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    matrix = matrix.double()
    size = len(matrix)
    ridge = _RIDGE * matrix.diagonal().mean() + torch.finfo(torch.float64).tiny
    matrix = matrix + ridge * torch.eye(size, dtype=torch.float64)
    weights = torch.zeros(size, dtype=torch.float64)
    weights[matrix.diagonal().argmin()] = 1
    active = weights > 0
    for _ in range(10 * size * size):
        best = _minimum_on_plane(matrix, active)
        if (best[active] <= 0).any():
            falling = active & (best <= 0)
            steps = weights / (weights - best).clamp(min=torch.finfo(torch.float64).tiny)
            step = steps[falling].min()
            weights = (weights + step * (best - weights)).clamp(min=0)
            active &= ~(falling & (steps == step))
            continue
        weights = best
        gradient = matrix @ weights
        value = weights @ gradient
        gradient[active] = torch.inf
        if gradient.min() >= value * (1 - 1e-12):
            break
        active[gradient.argmin()] = True
    return weights / weights.sum()


def _minimum_on_plane(matrix: Tensor, active: Tensor) -> Tensor:
    """The minimum with sum 1 over the active weights, which may be negative; the others are 0."""
    inverse_of_ones = torch.linalg.solve(matrix[active][:, active], torch.ones(int(active.sum()), dtype=matrix.dtype))
    best = torch.zeros(len(matrix), dtype=matrix.dtype)
    best[active] = inverse_of_ones / inverse_of_ones.sum()
    return best
