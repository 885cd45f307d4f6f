"""Predictions of a model, and the accuracies and other metrics of the clients that have it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.functional.classification import multiclass_accuracy

from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.client_samples import ClientSamples
from fedmoe_pl.evaluation.evaluation import LOSS, SPLITS, ClientEvaluation
from fedmoe_pl.evaluation.metrics import Meter, measures_loss, predicts_classes
from fedmoe_pl.evaluation.outputs import has_trained_gate, labelled_batches, outputs_of
from fedmoe_pl.evaluation.stacked_models import StackedModels
from fedmoe_pl.models import MixtureOfExperts

Outputs = Iterator[tuple[Tensor, Tensor | None, Tensor]]
"""Scores (b, C) or other outputs, weights (b, experts) of a gate that is not constant, and labels (b,) or other targets
of some samples after others."""


@torch.inference_mode()
def predict(module: LightningModule, datamodule: FederatedDataModule, samples: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits and gate weights for some samples of the data module."""
    logits, weights, _ = zip(*_outputs(module, datamodule, samples), strict=True)
    return torch.cat(logits), None if weights[0] is None else torch.cat(weights)


def _outputs(module: LightningModule, datamodule: FederatedDataModule, samples: Tensor) -> Outputs:
    """For each batch: logits (b, C), weights (b, experts) of a gate that is not constant, labels (b,), on the CPU."""
    for batch, y in labelled_batches(datamodule, samples):
        logits, weights = outputs_of(module, batch, datamodule.has_pairs)
        yield logits.cpu(), None if weights is None else weights.cpu(), y.cpu()


def _accuracies(predicted: Tensor, datamodule: FederatedDataModule, outputs: int) -> tuple[Tensor, Tensor]:
    """Accuracy of k models on the global test set: of each class (k, C), and over all samples (k,)."""
    labels = datamodule.y[datamodule.global_test].cpu().expand(predicted.shape)
    by_class, overall = (
        multiclass_accuracy(predicted, labels, outputs, average=average, multidim_average="samplewise")
        for average in ("none", "micro")
    )
    return by_class[:, : datamodule.num_classes].double(), overall


def evaluate_model(
    module: LightningModule,
    datamodule: FederatedDataModule,
    clients: Sequence[int],
    validation: ClientSamples,
    metrics: Mapping[str, Metric],
) -> Iterator[ClientEvaluation]:
    """The evaluations of clients that all have this model."""
    meter = Meter(module, metrics, [len(datamodule.global_test)], measures_loss(module, datamodule))
    if predicts_classes(module, datamodule):
        logits, _ = predict(module, datamodule, datamodule.global_test)
        accuracies = _accuracies(logits.argmax(1)[None], datamodule, logits.shape[1])
        if metrics:
            meter.update(logits, datamodule.y[datamodule.global_test].cpu())
    else:
        accuracies = None
        _measure(meter, _outputs(module, datamodule, datamodule.global_test))

    def outputs(parts: ClientSamples) -> Outputs:
        return _outputs(module, datamodule, parts.indices)

    return _evaluate(module, datamodule, clients, validation, metrics, accuracies, meter.values, outputs)


def evaluate_stack(
    models: StackedModels,
    module: LightningModule,
    datamodule: FederatedDataModule,
    clients: Sequence[int],
    validation: ClientSamples,
    metrics: Mapping[str, Metric],
) -> Iterator[ClientEvaluation]:
    """The evaluations of clients with small models of their own, all computed together."""
    with_loss, samples = measures_loss(module, datamodule), datamodule.global_test
    meter = Meter(module, metrics, [len(samples)] * len(clients), with_loss)
    if metrics or with_loss:
        scores, targets = models.outputs(datamodule, samples)
        for of_model in scores:
            meter.update(of_model, targets)
        predicted, width = scores.argmax(2), scores.shape[2]
    else:
        predicted, width = models.predict(datamodule, samples)
    accuracies = _accuracies(predicted, datamodule, width) if predicts_classes(module, datamodule) else None

    def outputs(parts: ClientSamples) -> Outputs:
        return models.of_each(datamodule, parts)

    return _evaluate(module, datamodule, clients, validation, metrics, accuracies, meter.values, outputs)


def _evaluate(
    module: LightningModule,
    datamodule: FederatedDataModule,
    clients: Sequence[int],
    validation: ClientSamples,
    metrics: Mapping[str, Metric],
    global_accuracies: tuple[Tensor, Tensor] | None,
    global_metrics: Mapping[str, Sequence[float]],
    outputs: Callable[[ClientSamples], Outputs],
) -> Iterator[ClientEvaluation]:
    """The evaluations of clients, from the results on the global test set and outputs on their own samples.

    The results are those of k models, or of one that several clients have: the accuracies of :func:`_accuracies`, None
    without class labels, and k values of each other metric.
    """
    chosen = torch.tensor(clients)
    held_out, validation = datamodule.test_samples.select(chosen), validation.select(chosen)
    samples, has_classes = _own_samples(module, datamodule, chosen), predicts_classes(module, datamodule)
    with_loss = measures_loss(module, datamodule)
    own = Meter(module, metrics, samples.sizes.tolist(), with_loss, (held_out.sizes > 0).tolist())
    of_validation = Meter(module, metrics, validation.sizes.tolist(), with_loss or _has_own_loss(module))
    nan = torch.full((len(clients),), math.nan)
    own_accuracy = reweighted = overall = validation_accuracy = validation_loss = nan
    if global_accuracies is not None:
        own_accuracy, _, weights = _predict_parts(module, outputs(samples), samples, own)
        validation_accuracy, validation_loss, _ = _predict_parts(module, outputs(validation), validation, of_validation)
        reweighted = _weighted(global_accuracies[0], datamodule.class_shares[chosen], datamodule)
        overall = global_accuracies[1].expand(len(clients))
    else:
        weights = _measure(own, outputs(samples))
        _measure(of_validation, outputs(validation))
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
        _by_client(len(clients), own.values, global_metrics, of_validation.values),
        strict=True,
    )
    return itertools.starmap(ClientEvaluation, columns)


def _own_samples(module: LightningModule, datamodule: FederatedDataModule, chosen: Tensor) -> ClientSamples:
    """Each client's held-out samples; for the weights of a trained gate, its training samples if it has none."""
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
def _measure(meter: Meter, outputs: Outputs) -> list[Tensor]:
    """Feeds outputs to a meter; returns the weights of a trained gate, batch by batch."""
    weights = []
    for scores, batch_weights, targets in outputs:
        meter.update(scores, targets)
        if batch_weights is not None:
            weights.append(batch_weights)
    return weights


@torch.inference_mode()
def _predict_parts(
    module: LightningModule, outputs: Outputs, parts: ClientSamples, meter: Meter
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Accuracy and mean loss of each part, shape (len(parts),), nan for an empty one, and a trained gate's weights."""
    right, losses, weights = [torch.empty(0, dtype=torch.bool)], [torch.empty(0, dtype=torch.float64)], []
    for scores, batch_weights, labels in outputs:
        right.append(scores.argmax(1) == labels)
        losses.append(_losses(module, scores, labels))
        if meter.values:
            meter.update(scores, labels)
        if batch_weights is not None:
            weights.append(batch_weights)
    ends = parts.sizes.cumsum(0)
    counts = torch.cat((torch.zeros(1, dtype=torch.int64), torch.cat(right).cumsum(0)))
    accuracies = (counts[ends] - counts[ends - parts.sizes]).float() / parts.sizes
    sums = torch.cat((torch.zeros(1, dtype=torch.float64), torch.cat(losses).cumsum(0)))
    mean_losses = (sums[ends] - sums[ends - parts.sizes]) / parts.sizes
    return accuracies, mean_losses, weights


def _losses(module: LightningModule, scores: Tensor, labels: Tensor) -> Tensor:
    """Loss of every sample, float64 (n,): the mixture's own loss, or cross-entropy for another module.

    nan if the mixture has a loss of the user's, which gives the mean of several samples.
    """
    if not isinstance(module, MixtureOfExperts):
        return F.cross_entropy(scores, labels, reduction="none").double()
    if _has_own_loss(module):
        return torch.full((len(labels),), math.nan, dtype=torch.float64)
    return module.loss_of(scores, labels, reduction="none").double()


def _pieces(tensor: Tensor, sizes: Tensor) -> list[Tensor]:
    """Splits a tensor along its first dimension into copies, because a view would be pickled with the whole tensor."""
    return [piece.clone() for piece in tensor.split(sizes.tolist())]


def _weighted(class_accuracy: Tensor, shares: Tensor, datamodule: FederatedDataModule) -> Tensor:
    """Mean of the class accuracies (1 or k, C), weighted with the clients' shares (k, C) of classes in the test set.

    nan for rotated images: the global test set has them in all rotations, which class shares know nothing of.
    """
    if datamodule.rotations is not None:
        return shares.new_full((len(shares),), math.nan)
    tested = datamodule.y[datamodule.global_test].bincount(minlength=datamodule.num_classes) > 0
    shares = shares * tested
    return (shares * class_accuracy).sum(dim=1) / shares.sum(dim=1)
