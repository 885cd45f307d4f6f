"""Accuracies of one client's personalized model, and how they spread over the clients (METHODS 6.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeGuard

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torchmetrics.functional.classification import multiclass_accuracy

from fedmoe_pl.aggregation import Tree, copy_module, load_tree
from fedmoe_pl.models import ConstantGate, PersonalizedMoE

if TYPE_CHECKING:
    from fedmoe_pl.backends import LocalTraining
    from fedmoe_pl.data import FederatedDataModule

_BATCH_SIZE = 1000
METRICS = ("local_test", "local_test_held_out", "global_test", "validation")


class Spread(NamedTuple):
    """How one accuracy spreads over the clients.

    Attributes:
        mean: unweighted mean over the clients.
        std: population standard deviation over the clients.
        worst_tenth: mean over the worst tenth of the clients (at least one client).
    """

    mean: float
    std: float
    worst_tenth: float


@dataclass(frozen=True)
class ClientEvaluation:
    """Accuracies (fractions in [0, 1]) of the model that one client would use.

    Attributes:
        client: the client's id.
        n_train: number of its training samples.
        local_test: accuracy per class on the global test set, weighted with the client's class shares.
        local_test_held_out: accuracy on held-out samples of the client itself; nan where none are held out.
        global_test: accuracy on the global test set.
        validation: accuracy on the client's validation samples; nan where it has none.
        gate_weights: weights of the experts, shape (n, experts), on the client's own samples (the held-out ones
            where it has any, else its training samples); None for a model without a gate.
        gate_labels: labels of those samples, shape (n,).
    """

    client: int
    n_train: int
    local_test: float
    local_test_held_out: float
    global_test: float
    validation: float
    gate_weights: Tensor | None = None
    gate_labels: Tensor | None = None

    @property
    def mean_gate_weight(self) -> float:
        """Mean weight of expert 0, the global one, on the client's own samples; nan without a gate."""
        return math.nan if self.gate_weights is None else self.gate_weights[:, 0].double().mean().item()


@dataclass(frozen=True)
class Evaluation:
    """The evaluation of one method on all clients, and the answer to "what is that accuracy?".

    Attributes:
        method: name of the phase.
        round: number of rounds the phase had completed.
        model: what was evaluated: "global expert", "local expert", "mixture", or the class of a user's module.
        moment: "after aggregation" or "after local training".
        selection: "last round", or "best round by ..." with the metric that selected it.
        clients: one entry per client, in the order of their ids.
    """

    method: str
    round: int
    model: str
    moment: str
    selection: str
    clients: list[ClientEvaluation]

    def spread(self, metric: str) -> Spread:
        """Mean, standard deviation and worst tenth over the clients that have the metric.

        Args:
            metric: one of ``METRICS``.

        Example:
            >>> nan = float("nan")
            >>> clients = [ClientEvaluation(i, 10, a, nan, a, nan) for i, a in enumerate((0.5, 0.7, 0.9))]
            >>> evaluation = Evaluation("FedAvg", 1, "global expert", "after aggregation", "last round", clients)
            >>> spread = evaluation.spread("local_test")
            >>> round(spread.mean, 3), round(spread.std, 3), spread.worst_tenth
            (0.7, 0.163, 0.5)
        """
        values = torch.tensor([getattr(c, metric) for c in self.clients], dtype=torch.float64)
        values = values[~values.isnan()].sort().values
        if not len(values):
            return Spread(math.nan, math.nan, math.nan)
        lowest = values[0]  # taken off and put back, so that equal accuracies have a deviation of exactly 0
        above = values - lowest
        worst = above[: math.ceil(len(values) / 10)]
        return Spread((lowest + above.mean()).item(), above.std(correction=0).item(), (lowest + worst.mean()).item())


def evaluate_clients(
    training: LocalTraining, server: Tree, kept: Mapping[int, Tree], device: torch.device
) -> list[ClientEvaluation]:
    """Evaluates the model that every client would use now: what the server sends it, and what it kept.

    Clients that were sent the same and kept nothing have the same model, which is evaluated once.

    Args:
        training: the phase's module, algorithm and data.
        server: the server's state.
        kept: what clients kept, by client.
        device: where to compute.

    Returns:
        One entry per client, in the order of their ids.
    """
    datamodule, algorithm = training.datamodule, training.algorithm
    module = copy_module(training.module).to(device).eval()
    evaluations = []
    shared_with_last: Tree | None = None
    class_accuracy, global_test = torch.empty(0), math.nan
    for client in range(datamodule.num_clients):
        sent, own = algorithm.server_send(server, client), kept.get(client, {})
        if own or sent is not shared_with_last:
            load_tree(module, {**training.initial, **sent, **own})
            class_accuracy, global_test = _global_test(module, datamodule)
        shared_with_last = None if own else sent
        evaluations.append(_evaluate_client(module, datamodule, client, class_accuracy, global_test))
    return evaluations


@torch.inference_mode()
def predict(module: LightningModule, datamodule: FederatedDataModule, samples: Tensor) -> tuple[Tensor, Tensor | None]:
    """Logits and gate weights for the samples of the data module with these indices.

    Args:
        module: in eval mode, on any device.
        datamodule: holds the samples.
        samples: indices (n,).

    Returns:
        Logits (n, C) and, for a module with a gate that is not constant, its weights (n, experts), on the CPU.
    """
    logits, weights = [], []
    for x, _ in datamodule.batches(samples, batch_size=_BATCH_SIZE):
        x = x.to(module.device)
        if _has_trained_gate(module):
            batch_logits, batch_weights = module.mix(x)
            weights.append(batch_weights.cpu())
        else:
            batch_logits = module(x)
        logits.append(batch_logits.cpu())
    return torch.cat(logits), torch.cat(weights) if weights else None


def _global_test(module: LightningModule, datamodule: FederatedDataModule) -> tuple[Tensor, float]:
    """Accuracy by class (C,) and over all samples of the global test set."""
    logits, _ = predict(module, datamodule, datamodule.global_test)
    labels = datamodule.y[datamodule.global_test]
    by_class = multiclass_accuracy(logits, labels, logits.shape[1], average="none")
    return by_class[: datamodule.num_classes].double(), _accuracy(logits, labels)


def _evaluate_client(
    module: LightningModule, datamodule: FederatedDataModule, client: int, class_accuracy: Tensor, global_test: float
) -> ClientEvaluation:
    held_out, validation = datamodule.test_samples[client], datamodule.validation_samples[client]
    own = held_out if len(held_out) else datamodule.train_samples[client]
    logits, gate_weights = (
        predict(module, datamodule, own) if _has_trained_gate(module) or len(held_out) else (None, None)
    )
    return ClientEvaluation(
        client=client,
        n_train=len(datamodule.train_samples[client]),
        local_test=_weighted(class_accuracy, datamodule.class_shares[client], datamodule),
        local_test_held_out=_accuracy(logits, datamodule.y[own]) if logits is not None and len(held_out) else math.nan,
        global_test=global_test,
        validation=_accuracy(predict(module, datamodule, validation)[0], datamodule.y[validation])
        if len(validation)
        else math.nan,
        gate_weights=gate_weights,
        gate_labels=datamodule.y[own] if gate_weights is not None else None,
    )


def _weighted(class_accuracy: Tensor, shares: Tensor, datamodule: FederatedDataModule) -> float:
    """Mean of the accuracies by class with the client's shares of the classes that the global test set has."""
    tested = datamodule.y[datamodule.global_test].bincount(minlength=datamodule.num_classes) > 0
    shares = shares * tested
    return ((shares * class_accuracy).sum() / shares.sum()).item()


def _has_trained_gate(module: LightningModule) -> TypeGuard[PersonalizedMoE]:
    return isinstance(module, PersonalizedMoE) and not isinstance(module.gate, ConstantGate)


def _accuracy(logits: Tensor, labels: Tensor) -> float:
    return multiclass_accuracy(logits, labels, logits.shape[1], average="micro").item()
