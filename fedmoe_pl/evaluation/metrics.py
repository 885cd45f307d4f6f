"""The metrics of a run beside accuracy, each computed on the samples of one client or on the global test set."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence

from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from fedmoe_pl.checks import InvalidArgumentError, check_kind
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.evaluation.evaluation import LOSS, SPLITS
from fedmoe_pl.evaluation.outputs import mixture_of
from fedmoe_pl.models.mixtures.tasks import preds_and_target


def predicts_classes(module: LightningModule, datamodule: FederatedDataModule) -> bool:
    """Whether each sample has a class, and the module predicts it, so that there are accuracies."""
    mixture = mixture_of(module)
    return datamodule.num_classes > 0 and (mixture is None or mixture.task == "multiclass")


def measures_loss(module: LightningModule, datamodule: FederatedDataModule) -> bool:
    """Whether the loss is a metric on all sets of samples: for mixtures, if there are no accuracies."""
    return mixture_of(module) is not None and not predicts_classes(module, datamodule)


def preds_of(module: LightningModule, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Predictions and targets, of a mixture as probabilities or values; those of other modules as they are."""
    mixture = mixture_of(module)
    return (outputs, targets) if mixture is None else preds_and_target(mixture.task, outputs, targets)


def names_of(metrics: Mapping[str, Metric], with_loss: bool) -> list[str]:
    """The names of the metrics' values, such as ``local_test_f1``; without the loss on validation samples."""
    of_loss = [f"{split}_{LOSS}" for split in SPLITS[:2]] if with_loss else []
    return [f"{split}_{name}" for name in metrics for split in SPLITS] + of_loss


def lower_is_better(metrics: Mapping[str, Metric]) -> list[str]:
    """The names of values of which a lower one is better, as torchmetrics says it; also those of the loss."""
    lower = [name for name, metric in metrics.items() if metric.higher_is_better is False]
    return [f"{split}_{name}" for name in (*lower, LOSS) for split in SPLITS]


class Meter:
    """Feeds the outputs for the samples of several parts, one part after another, to metrics.

    A mixture's outputs become probabilities, or values in regression; those of other modules are taken as they are. The
    ``values`` of each metric, one for each part, are nan if the part is not wanted, or has too few samples.
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
        """Takes the outputs (b, ...) and targets (b, ...) of the next samples, which may be of several parts."""
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
        self._part, self._left, self._loss = part, self.sizes[part] if part < len(self.sizes) else 0, 0.0
        for metric in self.metrics.values():
            metric.reset()

    def _update(self, outputs: Tensor, targets: Tensor) -> None:
        mixture = mixture_of(self.module)
        if mixture is not None and self.with_loss:
            self._loss += mixture.loss_of(outputs, targets).item() * len(targets)
        preds, target = preds_of(self.module, outputs, targets)
        for metric in self.metrics.values():
            metric.update(preds, target)

    def _end(self) -> None:
        part = self._part
        if self.wanted[part]:
            for name, metric in self.metrics.items():
                self.values[name][part] = _value(metric)
            if self.with_loss:
                self.values[LOSS][part] = self._loss / self.sizes[part]
        self._begin(part + 1)


def _value(metric: Metric) -> float:
    try:
        return float(metric.compute())
    except ValueError:  # too few samples, such as one for R2Score
        return math.nan


def check_metrics(metrics: Mapping[str, Metric] | None) -> dict[str, Metric]:
    """The metrics, whose names and values can be columns of files."""
    for name, metric in (metrics or {}).items():
        if not name.isidentifier() or name == LOSS:
            allowed = f"named by letters, digits and underscores, other than '{LOSS}'"
            raise InvalidArgumentError("Federation", "metrics", [*(metrics or {})], allowed)
        check_kind("Federation", f"metrics.{name}", metric, Metric, " of torchmetrics")
    return dict(metrics or {})


def check_values(metrics: Mapping[str, Metric], module: LightningModule, outputs: Tensor, targets: Tensor) -> None:
    """Refuses a metric that does not fit the outputs, or gives more than one number."""
    for name, metric in metrics.items():
        metric.reset()
        try:
            with warnings.catch_warnings():  # of few samples
                warnings.simplefilter("ignore")
                metric.update(*preds_of(module, outputs, targets))
                float(metric.compute())
        except (ValueError, RuntimeError, IndexError, TypeError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            shapes = f"outputs of shape {tuple(outputs.shape[1:])} and targets of shape {tuple(targets.shape[1:])}"
            allowed = f"a metric that gives one number for {shapes}"
            raise InvalidArgumentError("Federation", f"metrics.{name}", metric, allowed, reason) from error
        finally:
            metric.reset()
