"""Whether what clients send is in proportion to what they were sent, and to what the others send."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import median_high

import torch
from torch import Tensor

from fedmoe_pl.backends import Failure
from fedmoe_pl.trees import Tree


def out_of_proportion(sent: Mapping[int, Tree], received: Mapping[int, Tree], most: float) -> dict[int, Failure]:
    """Why clients are left out whose tensors have changed much more than is usual.

    Usual is the median of the other clients that have changed anything, or the length of what the client received, if
    that is longer: so a client that learns is not left out among others that hardly do, and one that is alone in its
    round is compared, too. Where there is nothing to compare with, all is usual.
    """
    changes = {client: _length(tree, received.get(client, {})) for client, tree in sent.items()}
    failures = {}
    for client, change in changes.items():
        others = [other for of_other, other in changes.items() if other and of_other != client]
        before = _length({name: received.get(client, {}).get(name) for name in sent[client]})
        usual = max(median_high(others or [0.0]), before)
        if usual and change > most * usual:
            failures[client] = Failure(
                f"its change is {change:.3g} long, which is more than max_change, {most:g}, times the usual {usual:.3g}"
            )
    return failures


def _length(tree: Mapping[str, Tensor | None], before: Mapping[str, Tensor] | None = None) -> float:
    """The Euclidean length of what has changed in floating-point tensors; without ``before``, of these themselves."""
    lengths = []
    for name, tensor in tree.items():
        if tensor is None or not tensor.is_floating_point():
            continue
        values, known = tensor.double(), (before or {}).get(name)
        if known is not None and known.shape == values.shape:
            values = values - known.double()
        # a mask in a buffer may have infinite values, which are the same before and after
        values = values.where(tensor.isfinite(), 0.0)
        lengths.append(torch.linalg.vector_norm(values).item())
    return math.hypot(*lengths)
