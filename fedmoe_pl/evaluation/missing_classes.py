"""Values of torchmetrics for samples that lack some classes, which it counts as 0, or as any number, in a mean."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torchmetrics import Metric, classification

_TASKS = ("Binary", "Multiclass", "Multilabel")
# EER and LogAUC are newer than the oldest torchmetrics that is allowed
_OF_BOTH, _OF_POSITIVES, _CORRELATIONS = (
    tuple(
        kind
        for name in names
        for task in _TASKS
        if (kind := getattr(classification, f"{task}{name}", None)) is not None
    )
    for names in (("AUROC", "EER", "LogAUC"), ("AveragePrecision",), ("MatthewsCorrCoef",))
)


def value_of(metric: Metric) -> float:
    """The value of a metric, whose state may be changed, so that it must be reset before its next samples.

    Metrics of a ranking are means over the classes or labels for which they are defined: those that some samples have
    and, but for average precision, others do not have. nan if there is none, or there are too few samples. A Matthews
    coefficient with a zero in its denominator is 0 also of two classes, as scikit-learn's.
    """
    try:
        with ExitStack() as stack:
            for each in metric.modules():  # a metric may be made of others
                if isinstance(each, _OF_BOTH + _OF_POSITIVES) and not stack.enter_context(_of_present_classes(each)):
                    return math.nan
                if isinstance(each, _CORRELATIONS):
                    _without_epsilon(each)
            return float(metric.compute())
    except ValueError:  # too few samples, such as one for R2Score
        return math.nan


@contextmanager
def _of_present_classes(metric: Any) -> Iterator[bool]:
    """Leaves the other classes or labels out of the state of a metric of a ranking; gives whether any are left."""
    number = next((name for name in ("num_classes", "num_labels") if getattr(metric, name, None) is not None), "")
    is_binned, is_class = metric.thresholds is not None, False
    preds = target = torch.empty(0)
    if is_binned:  # (thresholds, classes, target, prediction)
        negatives, positives = metric.confmat[0].sum(-1).unbind(-1)
    else:
        preds, target = (torch.cat([*parts]) for parts in (metric.preds, metric.target))
        is_class = number == "num_classes" and preds.dim() == 2
        of_each = F.one_hot(target, preds.shape[1]) if is_class else target
        positives, negatives = (of_each == 1).sum(0), (of_each == 0).sum(0)
    if getattr(metric, "average", None) == "micro":
        positives, negatives = positives.sum(), negatives.sum()
    present = positives > 0
    if isinstance(metric, _OF_BOTH):
        present &= negatives > 0
    if present.dim() == 0 or not present.any() or present.all():
        yield bool(present.any())
        return
    if is_binned:
        metric.confmat = metric.confmat[:, present]
    else:
        metric.preds = [preds[:, present]]
        metric.target = [present.cumsum(0)[target] - 1 if is_class else target[:, present]]
    asked = getattr(metric, number)
    setattr(metric, number, int(present.sum()))
    try:
        yield True
    finally:
        setattr(metric, number, asked)


def _without_epsilon(metric: Any) -> None:
    """Replaces a confusion matrix of two classes without a coefficient by one whose coefficient is 0."""
    matrix = metric.confmat if metric.confmat.dim() == 2 else metric.confmat.sum(0)
    if matrix.shape == (2, 2) and not (matrix.any(0).all() and matrix.any(1).all()):
        metric.confmat = torch.ones_like(metric.confmat)
