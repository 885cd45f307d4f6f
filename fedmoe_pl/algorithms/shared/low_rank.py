"""The two factors of low-rank adapters in a tree: A of shape (r, ...) and B of shape (m, r, ...) of ``W + s B A``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from fedmoe_pl.trees import Tree, precise

_NAME_OF_A = re.compile(r"(.+)\.lora_(embedding_)?A(\.weight)?")


def factor_names(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """The names of A and B of each adapter, by the name of the adapted layer.

    Example:
        >>> factor_names(["expert.fc.lora_A.weight", "expert.fc.lora_B.weight", "head.weight"])
        {'expert.fc': ('expert.fc.lora_A.weight', 'expert.fc.lora_B.weight')}
    """
    known = {*names}
    matches = [match for name in sorted(known) if (match := _NAME_OF_A.fullmatch(name))]
    pairs = {match[1]: (match[0], "B".join(match[0].rsplit("A", 1))) for match in matches}
    return {layer: pair for layer, pair in pairs.items() if pair[1] in known}


def product(a: Tensor, b: Tensor) -> Tensor:
    """B A as a matrix (m, n), in double precision; a kernel is flattened."""
    return b.flatten(1).double() @ a.flatten(1).double()


def mean_of_products(
    one: Mapping[str, Tensor], weight: float, other: Mapping[str, Tensor], other_weight: float
) -> Tree:
    """The factors, as matrices, of the weighted means of the products of two trees' factors.

    They are stacked, ``[B, B'] [A; A']`` with A and A' times their shares, until a stack has a higher rank than any
    product; then one of the factors is the product, and the other the identity. Hence no more memory is needed than for
    two matrices of the product's size, however many clients there are.
    """
    share, result = other_weight / (weight + other_weight), Tree()
    for name_of_a, name_of_b in factor_names(one).values():
        factors = (tree[name].flatten(1) for name in (name_of_a, name_of_b) for tree in (one, other))
        a, other_a, b, other_b = map(precise, factors)  # half precision would round sums
        a, b = torch.cat([(1 - share) * a, share * other_a]), torch.cat([b, other_b], dim=1)
        if len(a) > min(len(b), a.shape[1]):
            whole, identity = b @ a, torch.eye(min(len(b), a.shape[1]), dtype=a.dtype)
            a, b = (whole, identity) if len(b) <= a.shape[1] else (identity, whole)
        result |= {name_of_a: a, name_of_b: b}
    return result


def set_corner(target: Tensor, values: Tensor) -> Tensor:
    """A copy of a tensor with other values from its first element on, as many as there are along each dimension."""
    result = target.clone()
    result[tuple(map(slice, values.shape))] = values
    return result
