"""Means of features or outputs over the samples of each class, which some algorithms exchange in place of parameters.

In a tree, means of shape (C, F) are named ``<prefix>mean``, and the numbers that they are weighed with, of shape (C,),
``<prefix>count``. A class with the count 0 has no mean; its row is 0. What the server sends may have ``<prefix>known``
in place of the numbers, which says only which classes have a mean.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.algorithms.shared.parts import (
    evaluation_copy,
    logits_loss,
    mean_of_labelled,
    pair_of,
    pairs_of,
    split_expert,
)
from fedmoe_pl.models.inputs import call
from fedmoe_pl.trees import Tree, precise, problem_of_shapes


@torch.no_grad()
def class_means(
    client: Client, vectors: Callable[[LightningModule, Tensor], Tensor], prefix: str, per_client: bool = False
) -> Tree:
    """Means (C, F) over a client's training samples of each class, and counts (C,), in eval mode; on the CPU.

    ``vectors`` maps its module and samples (B, ...) to vectors (B, ...), whose means are in float32 if they are in half
    precision: its sums stop growing. With ``per_client``, counts are 1 for every class that the client has.
    """
    batches = client.batches(client.samples)
    module = evaluation_copy(client, batches)
    num_classes = client.datamodule.num_classes
    data = client.datamodule
    ((x, _),) = pairs_of(module, data.batches(data.train_samples.indices[:1]))
    first = precise(vectors(module, x)).flatten(1)  # a client without samples has means of this width, too
    sums = first.new_zeros(num_classes, first.shape[1])
    counts = first.new_zeros(num_classes)
    for x, y in pairs_of(module, batches):
        one_hot = F.one_hot(y, num_classes).to(sums)
        sums += one_hot.T @ precise(vectors(module, x)).flatten(1)
        counts += one_hot.sum(0)
    means = sums / counts.clamp(min=1)[:, None]
    counts = counts.clamp(max=1) if per_client else counts
    return {f"{prefix}mean": means.cpu(), f"{prefix}count": counts.long().cpu()}


def combine_class_means(a: Mapping[str, Tensor], b: Mapping[str, Tensor], prefix: str) -> Tree:
    """The means of two groups of clients as the means of all of them, class by class, and the sums of the counts."""
    mean, count = f"{prefix}mean", f"{prefix}count"
    if a[mean].shape != b[mean].shape:
        widths = " and ".join(str(tree[mean].shape[1]) for tree in (a, b))
        raise MisconfigurationException(f"Clients' models have features of widths {widths}, but must have the same.")
    total = a[count] + b[count]
    share = b[count].to(b[mean]) / total.clamp(min=1)
    return {mean: torch.lerp(a[mean], b[mean], share[:, None]), count: total}


def problem_of_class_means(
    sent: Mapping[str, Tensor],
    prefix: str,
    num_classes: int,
    most: int,
    others: Mapping[str, Sequence[int | None]] = MappingProxyType({}),
) -> str:
    """Why a client cannot have made means, as ``Algorithm.problem_of_update`` says it.

    ``most`` is the largest count of a class, ``others`` the shapes of what else it should have sent.
    """
    mean, count = f"{prefix}mean", f"{prefix}count"
    if problem := problem_of_shapes(sent, {**others, mean: (num_classes, None), count: (num_classes,)}):
        return problem
    return "" if bool(((sent[count] >= 0) & (sent[count] <= most)).all()) else "has the counts of other samples"


def update_class_means(server: Mapping[str, Tensor], combined: Mapping[str, Tensor], prefix: str) -> Tree:
    """The means of the round; a class that no client of the round has keeps its mean of earlier rounds.

    The numbers, which clients do not need, are left out.
    """
    mean, known = f"{prefix}mean", f"{prefix}known"
    new = combined[f"{prefix}count"] > 0
    if mean not in server:
        return {mean: combined[mean], known: new}
    return {mean: torch.where(new[:, None], combined[mean], server[mean]), known: server[known] | new}


def received_means(client: Client, sent: Mapping[str, Tensor], prefix: str) -> tuple[Tensor, Tensor]:
    """The means (C, F) that the server sent, and which classes have one, (C,); means (C, 1) if it sent none."""
    if f"{prefix}mean" in sent:
        known = sent[f"{prefix}known"] if f"{prefix}known" in sent else sent[f"{prefix}count"] > 0
        return sent[f"{prefix}mean"], known
    num_classes, parameter = client.datamodule.num_classes, next(client.module.parameters())
    return torch.zeros(num_classes, 1, dtype=parameter.dtype), torch.zeros(num_classes, dtype=torch.bool)


def rows_of_labels(table: Tensor, y: Tensor) -> Tensor:
    """The row of ``table`` (C, ...) for each label, (B, ...); any row for the label -100."""
    return table[y.clamp(min=0)]


def mean_of_known(values: Tensor, y: Tensor, known: Tensor) -> Tensor:
    """The mean of values (B,) over a batch, in which samples of a class that is not ``known`` (C,) count as 0."""
    return mean_of_labelled(torch.where(rows_of_labels(known, y), values, 0.0), y)


def loss_with_targets(
    module: LightningModule, expert: str, batch: Any, constants: Mapping[str, Tensor], weight: float
) -> Tensor:
    """The expert's loss, and ``weight`` times the mean squared error between features and their labels' targets.

    ``constants`` has the ``targets`` (C, F), and which of them are ``known`` (C,); others add 0.
    """
    x, y = pair_of(module, batch)
    extractor, classifier = split_expert(module, expert)
    features = call(extractor, x)
    errors = (features.flatten(1) - rows_of_labels(constants["targets"], y)).square().mean(1)
    return logits_loss(module, classifier(features), y) + weight * mean_of_known(errors, y, constants["known"])
