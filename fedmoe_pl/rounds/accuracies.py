"""Predictions of a model, and the accuracies of the clients that have it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics.functional.classification import multiclass_accuracy

from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.parts import Parts
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.rounds.evaluation import ClientEvaluation
from fedmoe_pl.rounds.outputs import has_trained_gate, labelled_batches, outputs_of
from fedmoe_pl.rounds.stacked_models import StackedModels

Outputs = Iterator[tuple[Tensor, Tensor | None, Tensor]]
"""Scores (b, C), weights (b, experts) of a gate that is not constant, and labels (b,) of some samples after others."""


@torch.inference_mode()
def predict(module: LightningModule, datamodule: FederatedDataModule, samples: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits and gate weights for some samples of the data module.

    Args:
        module: a module in eval mode, on any device.
        datamodule: the data module.
        samples: indices of the samples, shape (n,).

    Returns:
        Logits (n, C) and, for a module with a gate that is not constant, its weights (n, experts), on the CPU.
    """
    logits, weights, _ = zip(*_outputs(module, datamodule, samples), strict=True)
    return torch.cat(logits), None if weights[0] is None else torch.cat(weights)


def _outputs(module: LightningModule, datamodule: FederatedDataModule, samples: Tensor) -> Outputs:
    """For each batch: logits (b, C), weights (b, experts) of a gate that is not constant, labels (b,), on the CPU."""
    for batch, y in labelled_batches(datamodule, samples):
        logits, weights = outputs_of(module, batch, datamodule.has_pairs)
        yield logits.cpu(), None if weights is None else weights.cpu(), y.cpu()


def _global_test(predicted: Tensor, datamodule: FederatedDataModule, outputs: int) -> tuple[Tensor, Tensor]:
    """Accuracy of k models on the global test set: of each class (k, C), and over all samples (k,).

    Args:
        predicted: the classes that each model predicts, shape (k, n).
        datamodule: the data module.
        outputs: number of classes that the models know, at least C.
    """
    labels = datamodule.y[datamodule.global_test].cpu().expand(predicted.shape)
    by_class, overall = (
        multiclass_accuracy(predicted, labels, outputs, average=average, multidim_average="samplewise")
        for average in ("none", "micro")
    )
    return by_class[:, : datamodule.num_classes].double(), overall


def evaluate_model(
    module: LightningModule, datamodule: FederatedDataModule, clients: Sequence[int], validation: Parts
) -> Iterator[ClientEvaluation]:
    """The evaluations of clients that all have this model; ``validation`` has the validation samples of all clients."""
    logits, _ = predict(module, datamodule, datamodule.global_test)
    accuracies = _global_test(logits.argmax(1)[None], datamodule, logits.shape[1])

    def outputs(parts: Parts) -> Outputs:
        return _outputs(module, datamodule, parts.indices)

    return _evaluate(module, datamodule, clients, validation, accuracies, outputs)


def evaluate_stack(
    models: StackedModels,
    module: LightningModule,
    datamodule: FederatedDataModule,
    clients: Sequence[int],
    validation: Parts,
) -> Iterator[ClientEvaluation]:
    """The evaluations of clients with small models of their own, all computed together.

    Args:
        models: their models, in the order of ``clients``.
        module: a module of the clients' architecture, in eval mode.
        datamodule: the data module.
        clients: their ids.
        validation: the validation samples of all clients.
    """
    predicted, outputs_per_model = models.predict(datamodule, datamodule.global_test)
    accuracies = _global_test(predicted, datamodule, outputs_per_model)

    def outputs(parts: Parts) -> Outputs:
        return models.of_each(datamodule, parts)

    return _evaluate(module, datamodule, clients, validation, accuracies, outputs)


def _evaluate(
    module: LightningModule,
    datamodule: FederatedDataModule,
    clients: Sequence[int],
    validation: Parts,
    accuracies: tuple[Tensor, Tensor],
    outputs: Callable[[Parts], Outputs],
) -> Iterator[ClientEvaluation]:
    """The evaluations of clients, from their accuracies on the global test set and outputs on their own samples."""
    chosen = torch.tensor(clients)
    class_accuracy, global_test = accuracies
    held_out, validation = datamodule.test_samples.select(chosen), validation.select(chosen)
    samples, gate_labels = held_out, [None] * len(clients)
    if has_trained_gate(module):  # otherwise no predictions of training samples are needed
        train = datamodule.train_samples.select(chosen)
        both = Parts(torch.cat((held_out.indices, train.indices)), torch.cat((held_out.sizes, train.sizes)))
        samples = both.select(torch.arange(len(clients)) + len(clients) * (held_out.sizes == 0))
        gate_labels = _pieces(datamodule.y[samples.indices], samples.sizes)
    own_accuracy, _, gate_weights = _predict_parts(module, outputs(samples), samples)
    validation_accuracy, validation_loss, _ = _predict_parts(module, outputs(validation), validation)
    columns = zip(
        clients,
        datamodule.train_samples.sizes[chosen].tolist(),
        _weighted(class_accuracy, datamodule.class_shares[chosen], datamodule).tolist(),
        own_accuracy.where(held_out.sizes > 0, math.nan).tolist(),
        global_test.expand(len(clients)).tolist(),
        validation_accuracy.tolist(),
        gate_weights or [None] * len(clients),
        gate_labels,
        validation_loss.tolist(),
        [getattr(module, "has_global_expert", True)] * len(clients),
        strict=True,
    )
    return itertools.starmap(ClientEvaluation, columns)


@torch.inference_mode()
def _predict_parts(module: LightningModule, outputs: Outputs, parts: Parts) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Accuracy and mean loss of each part, shape (len(parts),), nan for an empty one, and a trained gate's weights."""
    right, losses, weights = [torch.empty(0, dtype=torch.bool)], [torch.empty(0, dtype=torch.float64)], []
    for scores, batch_weights, labels in outputs:
        right.append(scores.argmax(1) == labels)
        losses.append(_losses(module, scores, labels))
        if batch_weights is not None:
            weights.append(batch_weights)
    ends = parts.sizes.cumsum(0)
    counts = torch.cat((torch.zeros(1, dtype=torch.int64), torch.cat(right).cumsum(0)))
    accuracies = (counts[ends] - counts[ends - parts.sizes]).float() / parts.sizes
    sums = torch.cat((torch.zeros(1, dtype=torch.float64), torch.cat(losses).cumsum(0)))
    mean_losses = (sums[ends] - sums[ends - parts.sizes]) / parts.sizes
    return accuracies, mean_losses, _pieces(torch.cat(weights), parts.sizes) if weights else []


def _losses(module: LightningModule, scores: Tensor, labels: Tensor) -> Tensor:
    """Loss of every sample, float64 (n,): the mixture's own loss, or cross-entropy for another module."""
    if isinstance(module, MixtureOfExperts):
        return module.loss_of(scores, labels, reduction="none").double()
    return F.cross_entropy(scores, labels, reduction="none").double()


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
