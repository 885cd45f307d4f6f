"""Checks that model, metrics and the targets of the data fit each other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from fedmoe_pl.checks import InvalidArgumentError, tried
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.evaluation.accuracies import predict
from fedmoe_pl.evaluation.evaluation import METRICS, SPLITS
from fedmoe_pl.evaluation.metrics import check_values, measures_loss, names_of, predicts_classes
from fedmoe_pl.evaluation.outputs import described_batches, labelled_batches
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.models.mixtures.tasks import fits, range_problem
from fedmoe_pl.phases.phase import Phase

_TRIED_SAMPLES = 8


class TooManyClassesError(InvalidArgumentError):
    """The data have more classes than the model has outputs."""


def check_task(
    phase: Phase, module: LightningModule, datamodule: FederatedDataModule, metrics: Mapping[str, Metric]
) -> None:
    """Refuses a module or metrics that do not fit the targets."""
    if datamodule.y.dim() > 2 and (datamodule.augmentation or datamodule.rotations):
        argument = "augmentation" if datamodule.augmentation else "rotations"
        because = f"targets of shape {tuple(datamodule.y.shape[1:])} would not be changed with the images"
        raise InvalidArgumentError(datamodule, argument, "given", "left out", because)
    has_classes = predicts_classes(module, datamodule)
    needs_metrics = not (has_classes or isinstance(module, MixtureOfExperts))
    if not phase.evaluate and (has_classes or needs_metrics):
        return
    if needs_metrics and datamodule.reader is not None and not datamodule.reader.has_targets:
        because = (
            f"the data have {described_batches(datamodule)} without classes, so that no targets are known; let "
            "collate_fn make pairs of inputs and targets, or targets name a key of dicts"
        )
        raise InvalidArgumentError(str(phase), "evaluate", phase.evaluate, "False", because)
    if needs_metrics and not metrics:
        because = f"the targets of {type(datamodule).__name__} are not classes"
        raise InvalidArgumentError("Federation", "metrics", None, f"given for a {type(module).__name__}", because)
    only_shape = has_classes and not metrics
    samples = datamodule.train_samples.indices[:1] if only_shape else datamodule.global_test[:_TRIED_SAMPLES]
    with tried(f"{phase}: a {type(module).__name__} does not accept the samples of {type(datamodule).__name__}"):
        outputs = predict(module.eval(), datamodule, samples)[0]
        targets = torch.cat([targets.cpu() for _, targets in labelled_batches(datamodule, samples)])
    if has_classes and (outputs.ndim != 2 or outputs.shape[1] < datamodule.num_classes):
        allowed = f"one that gives a score for each of {datamodule.num_classes} classes"
        because = f"its outputs have shape {tuple(outputs.shape[1:])} for a sample"
        kind = TooManyClassesError if outputs.ndim == 2 else InvalidArgumentError
        raise kind(str(phase), "model", module, allowed, because)
    if not has_classes and isinstance(module, MixtureOfExperts):
        _check_targets(module, datamodule, outputs, targets)
    check_values(metrics, module, outputs, targets)


def _check_targets(module: MixtureOfExperts, datamodule: FederatedDataModule, outputs: Tensor, targets: Tensor) -> None:
    """Refuses a task of a mixture whose loss would compare its outputs with something else than the targets."""
    known = datamodule.y if datamodule.y.numel() else targets  # of samples that are read one by one, a few
    if module.task == "multiclass" and targets.is_floating_point():
        because = f"its targets are {targets.dtype} and no integers, which classes must be"
    elif not fits(module.task, outputs, targets):
        shapes = tuple(outputs.shape[1:]), tuple(targets.shape[1:])
        because = f"outputs of shape {shapes[0]} do not fit targets of shape {shapes[1]} for this task"
    elif problem := range_problem(module.task, module.criterion, outputs, known):
        because = f"they have {problem}"
    else:
        if (loss := module.loss_of(outputs, targets)).dim():  # a stack would train its sum
            because = f"it gives values of shape {tuple(loss.shape)}"
            raise InvalidArgumentError(
                module, "loss", module.criterion, "one that gives the mean, as a tensor", because
            )
        return
    allowed = f"one that fits the targets of {type(datamodule).__name__}"
    raise InvalidArgumentError(module, "task", module.task, allowed, because)


def check_metric(
    owner: object,
    argument: str,
    metric: str | None,
    datamodule: FederatedDataModule,
    metrics: Mapping[str, Metric],
    modules: Iterable[LightningModule],
) -> None:
    """Refuses a metric that would be nan for all clients."""
    if metric is None:
        return
    modules = [*modules]
    has_classes = any(predicts_classes(module, datamodule) for module in modules)
    has_loss = any(measures_loss(module, datamodule) for module in modules)
    known = [*(METRICS if has_classes else ()), *names_of(metrics, has_loss)]
    known += ["validation_loss"] if has_classes or has_loss else []
    lacking = {
        "validation": not len(datamodule.validation_samples.indices),
        "local_test": not len(datamodule.test_samples.indices),
        "reweighted_test": datamodule.rotations is not None,
    }
    known = [name for name in known if not any(lacks and name.startswith(split) for split, lacks in lacking.items())]
    if metric not in known:
        because = "no client has another metric; those on validation samples need a validation_fraction"
        raise InvalidArgumentError(owner, argument, metric, f"one of {', '.join(known)}", because)


def check_monitor(phase: Phase, metrics: Mapping[str, Metric]) -> None:
    """Refuses a monitor of which nobody knows whether a higher value is better."""
    for name, metric in metrics.items():
        if phase.monitor in [f"{split}_{name}" for split in SPLITS] and metric.higher_is_better is None:
            allowed = "a metric whose higher_is_better is true or false"
            raise InvalidArgumentError(str(phase), "select.monitor", phase.monitor, allowed)
