"""Checks that model, algorithm, metrics and the targets of the data fit each other."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.evaluation.accuracies import predict
from fedmoe_pl.evaluation.evaluation import METRICS, SPLITS
from fedmoe_pl.evaluation.metrics import check_values, measures_loss, names_of, predicts_classes
from fedmoe_pl.evaluation.outputs import described_batches, labelled_batches
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.models.mixtures.tasks import fits, range_problem
from fedmoe_pl.phases.phase import Phase

_TRIED_SAMPLES = 8


def check_task(
    phase: Phase, module: LightningModule, datamodule: FederatedDataModule, metrics: Mapping[str, Metric]
) -> None:
    """Refuses a module or metrics that do not fit the targets."""
    if datamodule.y.dim() > 2 and (datamodule.augmentation or datamodule.rotations):
        argument = "augmentation" if datamodule.augmentation else "rotations"
        because = f"targets of shape {tuple(datamodule.y.shape[1:])} would not be changed with the images"
        raise InvalidArgumentError(datamodule, argument, "given", "left out", because)
    if predicts_classes(module, datamodule):
        if phase.evaluate:
            _check_classes(phase, module, datamodule, metrics)
        return
    if isinstance(module, MixtureOfExperts):
        _check_mixture(phase, module, datamodule, metrics)
    elif phase.evaluate:
        if datamodule.reader is not None and not datamodule.reader.has_targets:
            because = (
                f"the data have {described_batches(datamodule)} without classes, so that no targets are known; let "
                "collate_fn make pairs of inputs and targets, or targets name a key of dicts"
            )
            raise InvalidArgumentError(str(phase), "evaluate", phase.evaluate, "False", because)
        if not metrics:
            because = f"the targets of {type(datamodule).__name__} are not classes"
            allowed = f"at least one for a {type(module).__name__}"
            raise InvalidArgumentError("Federation", "metrics", None, allowed, because)
        outputs, targets = _tried(phase, module, datamodule)
        check_values(metrics, module, outputs, targets)


def _tried(
    phase: Phase, module: LightningModule, datamodule: FederatedDataModule, number: int = _TRIED_SAMPLES
) -> tuple[Tensor, Tensor]:
    """The outputs and targets of some samples."""
    samples = datamodule.train_samples.indices[:1] if number == 1 else datamodule.global_test[:number]
    try:
        outputs = predict(module.eval(), datamodule, samples)[0]
        return outputs, torch.cat([targets.cpu() for _, targets in labelled_batches(datamodule, samples)])
    except (RuntimeError, ValueError, TypeError, LookupError) as error:
        layer, reason = _failed_layer(module, error), str(error).splitlines()[0]
        wrong = f"model is a {type(module).__name__}"
        if phase.gate is not None and layer.split(".")[0] == "gate":
            wrong = f"{phase}: gate is a {type(phase.gate).__name__}"
        raise MisconfigurationException(
            f"{wrong} that does not accept the data's {described_batches(datamodule)} "
            f"({f'{layer}: ' if layer else ''}{reason})."
        ) from error


def _failed_layer(module: LightningModule, error: Exception) -> str:
    """The name of the innermost layer in which an error arose; empty if it is none of the module's."""
    names = {id(layer): name for name, layer in module.named_modules()}
    frames = [frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return [names[id(each)] for each in [module, *frames] if id(each) in names][-1]


def _check_classes(
    phase: Phase, module: LightningModule, datamodule: FederatedDataModule, metrics: Mapping[str, Metric]
) -> None:
    """Refuses a module that does not accept the samples, or that has too few outputs."""
    logits, labels = _tried(phase, module, datamodule, _TRIED_SAMPLES if metrics else 1)
    if logits.ndim != 2 or logits.shape[1] < datamodule.num_classes:
        raise MisconfigurationException(
            f"model gives outputs of shape {tuple(logits.shape[1:])} for a sample, but the data have "
            f"{datamodule.num_classes} classes; it must give one output per class."
        )
    check_values(metrics, module, logits, labels)


def _check_mixture(
    phase: Phase, module: MixtureOfExperts, datamodule: FederatedDataModule, metrics: Mapping[str, Metric]
) -> None:
    """Refuses outputs that do not fit the targets, and a loss that is not one number."""
    outputs, targets = _tried(phase, module, datamodule)
    data = type(datamodule).__name__
    if module.task == "multiclass" and targets.is_floating_point():
        because = f"the targets of {data} are {targets.dtype} and no integers, which classes must be"
        raise InvalidArgumentError(module, "task", module.task, "binary, multilabel or regression", because)
    if not fits(module.task, outputs, targets):
        shapes = f"outputs of shape {tuple(outputs.shape[1:])} do not fit targets of shape {tuple(targets.shape[1:])}"
        allowed = f"one that fits the targets of {data}"
        raise InvalidArgumentError(module, "task", module.task, allowed, f"{shapes} for this task")
    known = datamodule.y if datamodule.y.numel() else targets  # of samples that are read one by one, a few
    if problem := range_problem(module.task, module.criterion, outputs, known):
        raise InvalidArgumentError(
            module, "task", module.task, f"one that fits the targets of {data}", f"they have {problem}"
        )
    loss = module.loss_of(outputs, targets)
    if not isinstance(loss, Tensor) or loss.dim():
        what = f"values of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        allowed = "one that gives one number, the mean over the samples, as a tensor"
        raise InvalidArgumentError(module, "loss", module.criterion, allowed, f"it gives {what}")
    check_values(metrics, module, outputs, targets)


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
    if metric not in known:
        raise InvalidArgumentError(owner, argument, metric, f"one of {', '.join(known)}")
    for split, samples, fraction in (
        ("validation", datamodule.validation_samples, "validation_fraction"),
        ("local_test", datamodule.test_samples, "test_fraction"),
    ):
        if metric.startswith(split) and not len(samples.indices):
            because = f"{fraction} is 0, so that no client has such samples"
            raise InvalidArgumentError(owner, argument, metric, "another metric", because)
    if metric == "reweighted_test" and datamodule.rotations is not None:
        because = "rotated images do not have it"
        raise InvalidArgumentError(owner, argument, metric, "another one, such as local_test", because)


def check_monitor(phase: Phase, metrics: Mapping[str, Metric]) -> None:
    """Refuses a monitor of which nobody knows whether a higher value is better."""
    for name, metric in metrics.items():
        if phase.monitor in [f"{split}_{name}" for split in SPLITS] and metric.higher_is_better is None:
            allowed = "a metric whose higher_is_better is true or false"
            raise InvalidArgumentError(str(phase), "select.monitor", phase.monitor, allowed)
