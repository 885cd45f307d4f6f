"""The aggregation matrix of FedMoE-DA, which says which experts are averaged together."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor


def aggregation_rows(
    proxies: Tensor, top_p: int | Literal["all"], temperature: float = 1.0, owners: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Computes the experts that each expert is averaged with, and their weights (FedMoE-DA, Eq. 9).

    Args:
        proxies: one row per expert, shape (experts, features).
        top_p: number P of other experts, chosen by the largest cosine of their proxies; of equal ones, the first.
        temperature: divides the cosines before the softmax over the chosen experts.
        owners: client of every expert, shape (experts,), to exclude other experts of the same client; None to exclude
            none.

    Returns:
        Indices and weights, both of shape (experts, P + 1); each expert itself comes first. The weights add up to 1;
        they are 0 if there are too few other experts.

    Example:
        >>> aggregation_rows(torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0]]), top_p=1)[0]
        tensor([[0, 2],
                [1, 0],
                [2, 0]])
    """
    unit = F.normalize(proxies.double(), dim=1)
    # rounded, so that cosines that differ only by the order of their sums are equal
    cosine = (unit @ unit.T).round(decimals=12).fill_diagonal_(1)
    if owners is not None:
        same = owners[:, None] == owners
        cosine = cosine.masked_fill(same.fill_diagonal_(False), -torch.inf)
    others = len(proxies) - 1 if top_p == "all" else min(top_p, len(proxies) - 1)
    ranked = cosine.clone().fill_diagonal_(torch.inf).argsort(dim=1, descending=True, stable=True)
    neighbours = ranked[:, : others + 1]
    return neighbours, (cosine.gather(1, neighbours) / temperature).softmax(dim=1).to(proxies.dtype)
