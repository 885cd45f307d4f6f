"""Predictions of a model, and the accuracies and other metrics of the clients that use it."""

from __future__ import annotations

import copy
import itertools
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric, MetricCollection, classification

from fedmoe_pl.checks import InvalidArgumentError, check_kind, reason_of
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.client_samples import ClientSamples
from fedmoe_pl.evaluation.evaluation import LOSS, SPLITS, ClientEvaluation
from fedmoe_pl.evaluation.outputs import (
    has_task,
    has_trained_gate,
    labelled_batches,
    mixture_of,
    outputs_of,
)
from fedmoe_pl.evaluation.stacked_models import StackedModels
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.models.inputs import inputs_of, rows_of
from fedmoe_pl.models.mixtures.tasks import IGNORED, loss_weight, preds_and_target

_MOST_VALUES = 2**26  # outputs computed at once when a language model is evaluated: 256 MiB of float32


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


Outputs = Iterator[tuple[Tensor, Tensor | None, Tensor]]
"""For one batch after another: scores (b, C) or other outputs, weights (b, experts) of a gate that is not constant, and
labels (b,) or other targets."""


@torch.inference_mode()
def predict(module: LightningModule, datamodule: FederatedDataModule, samples: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits and gate weights for some samples of the data module."""
    logits, weights, _ = zip(*_outputs(module, datamodule, samples), strict=True)
    return torch.cat(logits), None if weights[0] is None else torch.cat(weights)


def _outputs(module: LightningModule, datamodule: FederatedDataModule, samples: Tensor) -> Outputs:
    """The outputs for each batch, on the CPU."""
    for batch, y in labelled_batches(datamodule, samples, mixture_of(module)):
        for piece, targets in _in_pieces(module, batch, y):
            logits, weights = outputs_of(module, piece, datamodule.has_pairs)
            yield logits.cpu(), None if weights is None else weights.cpu(), targets.cpu()


def _in_pieces(module: LightningModule, batch: Any, y: Tensor) -> Iterator[tuple[Any, Tensor]]:
    """A batch with its targets or, if the model gives logits of the vocabulary for each token, pieces of the batch."""
    mixture = mixture_of(module)
    if mixture is None or not has_task(module, "causal_lm"):
        yield batch, y
        return
    x = inputs_of(batch, mixture.target_key)
    values = outputs_of(module, (rows_of(x, slice(1)), y[:1]), True)[0].numel()  # for one sample
    size = max(_MOST_VALUES // values, 1)
    for start in range(0, len(y), size):
        rows = slice(start, start + size)
        yield (rows_of(x, rows), y[rows]), y[rows]


@torch.inference_mode()
def _on_global_test(
    module: LightningModule, datamodule: FederatedDataModule, models: StackedModels | None, meter: Meter
) -> tuple[Tensor, Tensor] | None:
    """Measures one model or k models; returns the accuracies of each, or None without class labels."""
    samples, has_classes = datamodule.global_test, predicts_classes(module, datamodule)
    if models:
        scores, targets = models.outputs(datamodule, samples)
    elif has_classes:
        scores, targets = predict(module, datamodule, samples)[0][None], datamodule.y[samples].cpu()
    else:
        for outputs, _, targets in _outputs(module, datamodule, samples):
            meter.update(outputs, targets)
        return None
    for of_model in scores if meter.values else ():
        meter.update(of_model, targets)
    return _accuracies(scores.argmax(2), datamodule) if has_classes else None


def _accuracies(predicted: Tensor, datamodule: FederatedDataModule) -> tuple[Tensor, Tensor]:
    """Accuracies of k models on the global test set, float64: of each class (k, C), and over all samples (k,).

    torchmetrics computes in float32, where 27 of 30 is less than 0.9.
    """
    labels, classes = datamodule.y[datamodule.global_test].cpu(), datamodule.num_classes
    right = (predicted == labels).double()
    of_class = right.new_zeros(len(right), classes).index_add_(1, labels, right)
    return of_class / labels.bincount(minlength=classes).clamp_min(1), right.mean(1)


def evaluate(
    module: LightningModule,
    datamodule: FederatedDataModule,
    clients: Sequence[int],
    validation: ClientSamples,
    metrics: Mapping[str, Metric],
    models: StackedModels | None = None,
    shared: AbstractContextManager[None] | None = None,
) -> Iterator[ClientEvaluation]:
    """The evaluations of clients that all use this model, or, with ``models``, stacked models of their own.

    The outputs on the global test set are computed in the context ``shared``.
    """
    chosen = torch.tensor(clients)
    held_out, validation = datamodule.test_samples.select(chosen), validation.select(chosen)
    samples, has_classes = _own_samples(module, datamodule, chosen), predicts_classes(module, datamodule)
    with_loss = measures_loss(module, datamodule)
    of_global = Meter(module, metrics, [len(datamodule.global_test)] * (len(clients) if models else 1), with_loss)
    own = Meter(module, metrics, samples.sizes.tolist(), with_loss, (held_out.sizes > 0).tolist())
    of_validation = Meter(module, metrics, validation.sizes.tolist(), with_loss or _has_own_loss(module))

    def outputs(parts: ClientSamples) -> Outputs:
        return models.of_each(datamodule, parts) if models else _outputs(module, datamodule, parts.indices)

    with shared or nullcontext():
        of_classes = _on_global_test(module, datamodule, models, of_global)
    own_accuracy, _, weights = _measured(module, outputs(samples), samples, own, has_classes)
    validation_accuracy, validation_loss, _ = _measured(
        module, outputs(validation), validation, of_validation, has_classes
    )
    reweighted = overall = torch.full((len(clients),), math.nan)
    if of_classes is not None:
        reweighted = _weighted(of_classes[0], datamodule.class_shares[chosen], datamodule)
        overall = of_classes[1].expand(len(clients))
    no_gate: list[None] = [None] * len(clients)
    columns = zip(
        clients,
        datamodule.train_samples.sizes[chosen].tolist(),
        own_accuracy.where(held_out.sizes > 0, math.nan).tolist(),
        reweighted.tolist(),
        overall.tolist(),
        validation_accuracy.tolist(),
        _pieces(torch.cat(weights), samples.sizes) if weights else no_gate,
        _pieces(datamodule.y[samples.indices], samples.sizes) if weights and has_classes else no_gate,
        of_validation.values.pop(LOSS, validation_loss.tolist()),
        [getattr(module, "has_global_expert", True)] * len(clients),
        _by_client(len(clients), own.values, of_global.values, of_validation.values),
        map(datamodule.client_names.given_name, clients),
        held_out.sizes.tolist(),
        strict=True,
    )
    return itertools.starmap(ClientEvaluation, columns)


def _own_samples(module: LightningModule, datamodule: FederatedDataModule, chosen: Tensor) -> ClientSamples:
    """Each client's held-out samples; if it has none and the module a trained gate, its training samples."""
    held_out = datamodule.test_samples.select(chosen)
    if not has_trained_gate(module):
        return held_out
    train = datamodule.train_samples.select(chosen)
    both = ClientSamples(torch.cat((held_out.indices, train.indices)), torch.cat((held_out.sizes, train.sizes)))
    return both.select(torch.arange(len(chosen)) + len(chosen) * (held_out.sizes == 0))


def _has_own_loss(module: LightningModule) -> bool:
    return isinstance(module, MixtureOfExperts) and module.criterion is not None


def _by_client(number: int, *of_splits: Mapping[str, Sequence[float]]) -> list[dict[str, float]]:
    """The metrics of each client, by names such as ``local_test_f1``."""
    names = dict.fromkeys(name for values in of_splits for name in values)
    columns = {
        f"{split}_{name}": [*values[name]] * (number if len(values[name]) == 1 else 1)
        for name in names
        for split, values in zip(SPLITS, of_splits, strict=True)
        if name in values
    }
    return [{name: column[client] for name, column in columns.items()} for client in range(number)]


@torch.inference_mode()
def _measured(
    module: LightningModule, outputs: Outputs, parts: ClientSamples, meter: Meter, has_classes: bool
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Accuracy and mean loss of each part, (len(parts),), NaN if it is empty; and the weights of a trained gate."""
    right, losses, weights = [torch.empty(0, dtype=torch.bool)], [torch.empty(0, dtype=torch.float64)], []
    for scores, batch_weights, targets in outputs:
        if has_classes:
            right.append(scores.argmax(1) == targets)
            losses.append(_losses(module, scores, targets))
        if meter.values:
            meter.update(scores, targets)
        if batch_weights is not None:
            weights.append(batch_weights)
    if not has_classes:
        nan = torch.full((len(parts),), math.nan)
        return nan, nan, weights
    owners = torch.arange(len(parts)).repeat_interleave(parts.sizes)
    zeros = torch.zeros(len(parts), dtype=torch.float64)
    of_right, of_losses = (zeros.index_add(0, owners, torch.cat(each).double()) for each in (right, losses))
    return of_right / parts.sizes, of_losses / parts.sizes, weights


def _losses(module: LightningModule, scores: Tensor, labels: Tensor) -> Tensor:
    """Loss of every sample, float64 (n,): the mixture's own loss, or cross-entropy for another module.

    NaN if a user has given the mixture a loss, because it returns the mean over several samples.
    """
    if not isinstance(module, MixtureOfExperts):
        return F.cross_entropy(scores, labels, reduction="none").double()
    if _has_own_loss(module):
        return torch.full((len(labels),), math.nan, dtype=torch.float64)
    return module.loss_of(scores, labels, reduction="none").double()


def _pieces(tensor: Tensor, sizes: Tensor) -> list[Tensor]:
    """Splits a tensor along its first dimension into copies, because pickling a view includes the whole tensor."""
    return [piece.clone() for piece in tensor.split(sizes.tolist())]


def _weighted(class_accuracy: Tensor, shares: Tensor, datamodule: FederatedDataModule) -> Tensor:
    """Mean of the class accuracies (1 or k, C), weighted by the clients' shares (k, C) of the classes in the test set.

    NaN for rotated images: the global test set has all rotations, about which class shares say nothing.
    """
    if datamodule.rotations is not None:
        return shares.new_full((len(shares),), math.nan)
    tested = datamodule.y[datamodule.global_test].bincount(minlength=datamodule.num_classes) > 0
    shares = shares * tested
    return (shares * class_accuracy).sum(dim=1) / shares.sum(dim=1)


_TASKS = ("Binary", "Multiclass", "Multilabel")
# the oldest supported torchmetrics lacks EER and LogAUC
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
