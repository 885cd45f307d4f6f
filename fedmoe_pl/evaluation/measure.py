"""One model, or a stack of them, on the samples of clients: predictions, accuracies, losses and other metrics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics import Metric

from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.data.client_samples import ClientSamples
from fedmoe_pl.evaluation.metrics import Meter, measures_loss, predicts_classes
from fedmoe_pl.evaluation.outputs import has_task, has_trained_gate, labelled_batches, mixture_of, outputs_of
from fedmoe_pl.evaluation.results import LOSS, SPLITS, ClientEvaluation
from fedmoe_pl.evaluation.stacked_models import StackedModels
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.models.inputs import Inputs, batch_size_of, inputs_of, rows_of
from fedmoe_pl.trees import precise

_MOST_VALUES = 2**26  # outputs computed at once when a language model is evaluated: 256 MiB of float32
Outputs = Iterator[tuple[Tensor, Tensor | None, Tensor]]
"""For one batch after another: scores (b, C) or other outputs, weights (b, experts) of a gate that is not constant, and
labels (b,) or other targets."""


@torch.inference_mode()
def predict(
    module: LightningModule, datamodule: FederatedDataModule, samples: Tensor
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Logits, gate weights and targets for some samples of the data module."""
    logits, weights, targets = zip(*_outputs(module, datamodule, samples), strict=True)
    return torch.cat(logits), None if weights[0] is None else torch.cat(weights), torch.cat(targets)


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
    for rows in pieces_of(mixture, x):
        yield (rows_of(x, rows), y[rows]), y[rows]


def pieces_of(mixture: MixtureOfExperts, x: Inputs) -> Iterator[slice]:
    """Which inputs are computed at once: all, or some if there are logits of the vocabulary for each token."""
    size = number = batch_size_of(x)
    if mixture.task == "causal_lm":
        values = outputs_of(mixture, (rows_of(x, slice(1)), None), True)[0].numel()  # for one sample
        size = max(_MOST_VALUES // values, 1)
    yield from (slice(start, start + size) for start in range(0, number, size))


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
        return F.cross_entropy(precise(scores), labels, reduction="none").double()
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
