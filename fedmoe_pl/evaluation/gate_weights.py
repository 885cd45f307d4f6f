"""The weights that clients' gates give their own samples, by class and by expert."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from fedmoe_pl.evaluation.evaluation import Evaluation


def gate_rows(evaluation: Evaluation, num_classes: int) -> Iterator[dict[str, object]]:
    """One method's rows of ``gate_weights.csv``: the gate's mean weights on each client's own samples of each class.

    A client has one row, for the total weight of the global experts. If no expert is global, it has a row for each.
    """
    for client in evaluation.clients:
        if client.gate_weights is None or client.gate_labels is None:
            continue
        if client.global_weights is not None:
            weights = {"global": client.global_weights}
        else:
            weights = {str(expert): column for expert, column in enumerate(client.gate_weights.unbind(dim=1))}
        for expert, column in weights.items():
            means = _means_by_class(column, client.gate_labels, num_classes).tolist()
            yield {
                "method": evaluation.method,
                "evaluation_point": evaluation.evaluation_point,
                "client": client.client,
                "expert": expert,
                **{f"class_{label}": mean for label, mean in enumerate(means)},
            }


def _means_by_class(weights: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Mean of the weights, shape (n,), of each class, shape (num_classes,); nan for classes without a sample."""
    labels = labels.cpu()
    sums = torch.zeros(num_classes, dtype=torch.float64).index_add(0, labels, weights.detach().cpu().double())
    return sums / torch.bincount(labels, minlength=num_classes)  # 0 / 0 is nan


def expert_usage(evaluation: Evaluation) -> Tensor:
    """For each client and expert, the share of the client's own samples whose largest gate weight is that expert's."""
    weights = [client.gate_weights for client in evaluation.clients]
    most = max(client_weights.shape[1] for client_weights in weights if client_weights is not None)
    shares = torch.full((len(weights), most), math.nan, dtype=torch.float64)
    for row, client_weights in zip(shares, weights, strict=True):
        if client_weights is not None:
            samples, experts = client_weights.shape
            row[:experts] = client_weights.argmax(dim=1).bincount(minlength=experts).double() / samples
    return shares
