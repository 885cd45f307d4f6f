"""Trees whose matrices are truncated singular value decompositions, as FedKD sends them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedmoe_pl.trees import Tree


def compressed(tree: Mapping[str, Tensor], energy: float) -> Tree:
    """Replaces each matrix by the factors of its truncated singular value decomposition, if these are smaller.

    A tensor (m, ...) is a matrix with m rows. The factors ``<name>/u`` (m, r), ``<name>/s`` (r,) and ``<name>/v``
    (r, n) keep at least the share ``energy`` of the squared singular values; 1 compresses nothing.

    Example:
        >>> {name: tuple(factor.shape) for name, factor in compressed({"w": torch.ones(4, 3, 2)}, 0.95).items()}
        {'w/u': (4, 1), 'w/s': (1,), 'w/v': (1, 6)}
    """
    result: Tree = {}
    for name, tensor in tree.items():
        matrix = tensor.flatten(1) if tensor.ndim > 1 else tensor
        factors = _factors(matrix, energy) if tensor.ndim > 1 and energy < 1 and matrix.isfinite().all() else {}
        if factors and sum(factor.numel() for factor in factors.values()) < matrix.numel():
            result |= {f"{name}/{factor}": values for factor, values in factors.items()}
        else:
            result[name] = matrix
    return result


def expanded(tree: Mapping[str, Tensor]) -> Tree:
    """The tensors of a compressed tree: matrices (m, n), of which those with factors are their products.

    Example:
        >>> expanded({"w/u": torch.ones(2, 1), "w/s": torch.tensor([3.0]), "w/v": torch.ones(1, 2)})
        {'w': tensor([[3., 3.],
                [3., 3.]])}
    """
    result: Tree = {}
    for name, tensor in tree.items():
        whole, _, factor = name.rpartition("/")
        if not whole:
            result[name] = tensor
        elif factor == "u":
            result[whole] = (tensor * tree[f"{whole}/s"]) @ tree[f"{whole}/v"]
    return result


def _factors(matrix: Tensor, energy: float) -> Tree:
    """The truncated singular value decomposition of a matrix."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    reached = s.double().square().cumsum(0)
    rank = min(int((reached < energy * reached[-1]).sum()) + 1, len(s))
    return {"u": u[:, :rank].clone(), "s": s[:rank].clone(), "v": v[:rank].clone()}
