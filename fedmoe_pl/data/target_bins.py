"""Bins of targets that are numbers, which partitioners take for classes."""

from __future__ import annotations

import torch
from torch import Tensor

from fedmoe_pl.checks import InvalidArgumentError, check_at_least
from fedmoe_pl.data.arrays import are_classes


def quantile_bins(owner: object, targets: Tensor, num_training: int, num_bins: int) -> Tensor:
    """The bin of each target, int64, shape (n,), from 0 for the lowest.

    The edges are quantiles of the first ``num_training`` targets, so that as many of these are in each bin, up to one.
    Equal targets are in the same bin: frequent ones make it larger, and there may be fewer bins.
    """
    check_at_least(owner, "target_bins", num_bins, 2)
    values = targets.flatten()
    if are_classes(targets) or len(values) != len(targets):
        because = f"quantiles need one number for each sample, and {_described(targets)}"
        raise InvalidArgumentError(owner, "target_bins", num_bins, "left out", because)
    training = values[:num_training].sort().values
    if (different := len(training.unique_consecutive())) < num_bins:
        because = "so many different targets have the training samples"
        raise InvalidArgumentError(owner, "target_bins", num_bins, f"at most {different}", because)
    edges = torch.stack([part[0] for part in training.tensor_split(num_bins)[1:]]).unique()
    return torch.bucketize(values, edges[edges > training[0]], right=True)


def _described(targets: Tensor) -> str:
    if are_classes(targets):
        return "these are classes"
    shape = tuple(targets.shape[1:])
    return f"targets have shape {shape}" if targets.numel() else "samples that are read one by one have unknown targets"
