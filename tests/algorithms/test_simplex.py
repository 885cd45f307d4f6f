"""Quadratic programs over the simplex against closed forms, a fine grid and all supports."""

from itertools import combinations

import pytest
import torch

from fedmoe_pl.algorithms.fedpac import simplex_minimum


def value(matrix, weights):
    return (weights @ matrix @ weights).item()


def gram(size, rank, seed):
    rows = torch.randn(size, rank, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return rows @ rows.T


def of_all_supports(matrix):
    """The minimum over all supports in which the minimum on the plane has positive weights."""
    best, size = None, len(matrix)
    for number in range(1, size + 1):
        for support in combinations(range(size), number):
            part = matrix[list(support)][:, list(support)]
            within = torch.linalg.solve(part, torch.ones(number, dtype=torch.float64))
            weights = torch.zeros(size, dtype=torch.float64)
            weights[list(support)] = within / within.sum()
            if (weights >= 0).all() and (best is None or value(matrix, weights) < value(matrix, best)):
                best = weights
    return best


@pytest.mark.parametrize(("p", "q", "r"), [(1.0, 3.0, 0.0), (2.0, 1.0, -0.5), (1.0, 4.0, 1.5), (5.0, 1.0, 2.0)])
def test_two_weights_have_a_closed_form(p, q, r):
    """a^2 p + 2 a (1 - a) r + (1 - a)^2 q is least at a = (q - r) / (p + q - 2 r), or at an end."""
    first = min(max((q - r) / (p + q - 2 * r), 0.0), 1.0)
    weights = simplex_minimum(torch.tensor([[p, r], [r, q]]))
    assert weights.tolist() == pytest.approx([first, 1 - first], abs=1e-12)


@pytest.mark.parametrize("size", [1, 4, 7])
@pytest.mark.parametrize("seed", range(6))
def test_the_minimum_is_that_of_the_best_support(size, seed):
    matrix = gram(size, size + 1, seed)
    torch.testing.assert_close(simplex_minimum(matrix), of_all_supports(matrix), rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("matrix", [torch.zeros(4, 4), torch.ones(4, 4), gram(30, 5, 0), gram(40, 60, 1)])
def test_singular_and_large_matrices_have_a_minimum_where_no_weight_would_lower_the_value(matrix):
    weights = simplex_minimum(matrix)
    assert (weights >= 0).all() and weights.sum().item() == pytest.approx(1)
    gradient = matrix.double() @ weights
    assert gradient.min().item() >= (weights @ gradient).item() - 1e-9
