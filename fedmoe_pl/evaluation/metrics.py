"""The metrics of torchmetrics, each for many clients at once, and their values where a client lacks classes."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection, classification

from fedmoe_pl.checks import InvalidArgumentError, check_kind, reason_of
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.evaluation.outputs import has_task, mixture_of
from fedmoe_pl.evaluation.results import LOSS, SPLITS
from fedmoe_pl.models.mixtures.tasks import IGNORED, loss_weight, preds_and_target


def predicts_classes(module: LightningModule, datamodule: FederatedDataModule) -> bool:
    """Whether each sample has a class and the module predicts it, so that there are accuracies."""
    mixture = mixture_of(module)
    return datamodule.num_classes > 0 and (mixture is None or mixture.task == "multiclass")


def measures_loss(module: LightningModule, datamodule: FederatedDataModule) -> bool:
    """Whether the loss is a metric on all sets of samples: for mixtures without accuracies."""
    return mixture_of(module) is not None and not predicts_classes(module, datamodule)


def preds_of(module: LightningModule, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions and targets: a mixture's outputs as probabilities or values, other modules' outputs unchanged."""
    mixture = mixture_of(module)
    return (outputs, targets) if mixture is None else preds_and_target(mixture.task, outputs, targets)


def _update(metric: Metric, preds: Tensor, target: Tensor) -> None:
    """Updates a metric; real values as float64, because some metrics, such as R2Score, subtract large sums."""
    if target.is_floating_point():
        preds, target = preds.double(), target.double()
        # a metric may contain others, whose types `set_dtype` does not change
        for each in (each for each in metric.modules() if isinstance(each, Metric) and each.dtype != target.dtype):
            each.set_dtype(target.dtype)
    metric.update(preds, target)


def names_of(metrics: Mapping[str, Metric], with_loss: bool) -> list[str]:
    """The names of the metrics' values, such as ``local_test_f1``, without the loss on validation samples."""
    of_loss = [f"{split}_{LOSS}" for split in SPLITS[:2]] if with_loss else []
    return [f"{split}_{name}" for name in metrics for split in SPLITS] + of_loss


def lower_is_better(metrics: Mapping[str, Metric]) -> list[str]:
    """The names of values for which lower is better according to torchmetrics, and those of the loss."""
    lower = [name for name, metric in metrics.items() if metric.higher_is_better is False]
    return [f"{split}_{name}" for name in (*lower, LOSS) for split in SPLITS]


class Meter:
    """Computes metrics for several parts of the samples, whose outputs arrive one part after another.

    A mixture's outputs become probabilities, or values in regression; other modules' outputs are used unchanged. The
    ``values`` of each metric, one per part, are NaN for parts that are not wanted or have too few samples.
    """

    def __init__(
        self,
        module: LightningModule,
        metrics: Mapping[str, Metric],
        sizes: Sequence[int],
        with_loss: bool,
        wanted: Sequence[bool] | None = None,
    ) -> None:
        self.module = module
        self.metrics = metrics
        self.sizes = sizes
        self.with_loss = with_loss
        self.wanted = [True] * len(sizes) if wanted is None else wanted
        self.values = {name: [math.nan] * len(sizes) for name in (*metrics, *([LOSS] if with_loss else []))}
        self._begin(0)

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        """Takes the outputs (b, ...) and targets (b, ...) of the next samples, which may belong to several parts."""
        while len(targets):
            count = min(self._left, len(targets))
            if self.wanted[self._part]:
                self._update(outputs[:count], targets[:count])
            outputs, targets = outputs[count:], targets[count:]
            self._left -= count
            if not self._left:
                self._end()

    def _begin(self, part: int) -> None:
        while part < len(self.sizes) and not self.sizes[part]:
            part += 1
        self._part, self._left = part, self.sizes[part] if part < len(self.sizes) else 0
        self._loss, self._weight = 0.0, 0.0
        self._metrics = {name: _fresh(metric) for name, metric in self.metrics.items()}

    def _update(self, outputs: Tensor, targets: Tensor) -> None:
        mixture = mixture_of(self.module)
        if mixture is not None and self.with_loss and (weight := loss_weight(mixture.task, mixture.criterion, targets)):
            # beside the tensors that a loss may have, such as weights of classes
            device = outputs.device if mixture.criterion is None else self.module.device
            self._loss += mixture.loss_of(outputs.to(device), targets.to(device)).item() * weight
            self._weight += weight
        preds, target = preds_of(self.module, outputs, targets)
        for metric in self._metrics.values():
            _update(metric, preds, target)

    def _end(self) -> None:
        part = self._part
        if self.wanted[part]:
            for name, metric in self._metrics.items():
                self.values[name][part] = value_of(metric)
            if self.with_loss:
                self.values[LOSS][part] = self._loss / self._weight if self._weight else math.nan
        self._begin(part + 1)


def check_metrics(metrics: Mapping[str, Metric] | None) -> dict[str, Metric]:
    """Copies of the metrics, checked so that their names can be columns of files."""
    if not isinstance(metrics, Mapping | MetricCollection | None):
        raise InvalidArgumentError("Federation", "metrics", metrics, "a dict of names and metrics of torchmetrics")
    for name, metric in (metrics or {}).items():
        if not str(name).isidentifier() or name == LOSS:
            allowed = f"named by letters, digits and underscores, other than '{LOSS}'"
            raise InvalidArgumentError("Federation", "metrics", [*(metrics or {})], allowed)
        check_kind("Federation", f"metrics.{name}", metric, Metric, " of torchmetrics")
    return {name: copy.deepcopy(metric) for name, metric in (metrics or {}).items()}


def check_values(metrics: Mapping[str, Metric], module: LightningModule, outputs: Tensor, targets: Tensor) -> None:
    """Refuses a metric that does not fit the outputs, or gives more than one number."""
    for name, metric in metrics.items():
        if has_task(module, "causal_lm") and getattr(metric, "ignore_index", IGNORED) != IGNORED:
            allowed, reason = f"one with ignore_index {IGNORED}", "tokens that do not count have this target"
            raise InvalidArgumentError("Federation", f"metrics.{name}", metric, allowed, reason)
        metric = _fresh(metric)
        try:
            with warnings.catch_warnings():  # torchmetrics warns of few samples
                warnings.simplefilter("ignore")
                _update(metric, *preds_of(module, outputs, targets))
                float(metric.compute())
        except (ValueError, RuntimeError, IndexError, TypeError) as error:
            reason = reason_of(error)
            shapes = f"outputs of shape {tuple(outputs.shape[1:])} and targets of shape {tuple(targets.shape[1:])}"
            allowed = f"a metric that gives one number for {shapes}"
            raise InvalidArgumentError("Federation", f"metrics.{name}", metric, allowed, reason) from error


def _fresh(metric: Metric) -> Metric:
    """The metric as if it had seen nothing; one of a user's class as a copy, because ``reset`` knows only states."""
    if all(type(each).__module__.startswith("torchmetrics.") for each in metric.modules() if isinstance(each, Metric)):
        metric.reset()
        return metric
    return copy.deepcopy(metric)


_TASKS = ("Binary", "Multiclass", "Multilabel")
# the oldest supported torchmetrics lacks EER and LogAUC
_OF_BOTH, _OF_POSITIVES, _CORRELATIONS = (
    tuple(filter(None, (getattr(classification, f"{task}{name}", None) for name in names for task in _TASKS)))
    for names in (("AUROC", "EER", "LogAUC"), ("AveragePrecision",), ("MatthewsCorrCoef",))
)


def value_of(metric: Metric) -> float:
    """The value of a metric; may change the metric's state, so that it must be reset before its next samples.

    Ranking metrics are means over the classes or labels for which they are defined: those that some samples have and,
    except for average precision, some lack. NaN if there are none, or too few samples. A Matthews coefficient with a
    zero denominator is 0, as in scikit-learn, also for two classes.
    """
    try:
        with ExitStack() as stack:
            for each in metric.modules():  # a metric may contain others
                if isinstance(each, _OF_BOTH + _OF_POSITIVES) and not stack.enter_context(_of_present_classes(each)):
                    return math.nan
                if isinstance(each, _CORRELATIONS):
                    _without_epsilon(each)
            return float(metric.compute())
    except ValueError:  # too few samples, such as one for R2Score
        return math.nan


@contextmanager
def _of_present_classes(metric: Any) -> Iterator[bool]:
    """Drops classes or labels for which a ranking metric is undefined from its state; yields whether any are left."""
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
    """Replaces a two-class confusion matrix whose Matthews coefficient is undefined by one whose coefficient is 0."""
    matrix = metric.confmat if metric.confmat.dim() == 2 else metric.confmat.sum(0)
    if matrix.shape == (2, 2) and not (matrix.any(0).all() and matrix.any(1).all()):
        metric.confmat = torch.ones_like(metric.confmat)
