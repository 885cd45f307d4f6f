"""Clients' answers as the server uses them; one that it cannot use is a failure of the client that sent it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from math import nan
from statistics import median_high

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from fedmoe_pl.aggregation.aggregation import PREFIX
from fedmoe_pl.algorithms.algorithm import weight_of
from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.backends import Failure, LocalTraining, NotFiniteError, check_finite
from fedmoe_pl.deployment.messages import Message
from fedmoe_pl.deployment.remote_clients import AtClient
from fedmoe_pl.evaluation.metrics import measures_loss, names_of
from fedmoe_pl.evaluation.results import ACCURACIES, ClientEvaluation
from fedmoe_pl.models import MixtureOfExperts
from fedmoe_pl.trees import Tree


def cannot_be_used(what: str, error: Exception) -> Failure:
    """The failure of a client whose values made the server's computation raise an exception."""
    return Failure(f"its {what} cannot be used ({' '.join(f'{type(error).__name__}: {error}'.split())[:200]})")


def update_of(answer: Message, training: LocalTraining, client: int, round: int) -> Update | Failure:
    """A client's update of a round."""
    weight, aggregation, initial = answer.values["weight"], training.aggregation, training.of(client).initial
    if reason := problem_of_weight(weight, training, client) or problem_of(answer.tensors, weight, initial):
        return Failure(reason)
    update = Update(answer.tensors, weight, AtClient(answer.values["keeps"]))
    by_algorithm = update
    if aggregation is not None:
        own = {name: tensor for name, tensor in update.sent.items() if not name.startswith(PREFIX)}
        by_algorithm = replace(update, sent=own)
    if problem := training.algorithm.problem_of_update(client, by_algorithm, initial, training.datamodule, round):
        return Failure(f"its update {problem}")
    return update if aggregation is None else aggregation.of_remote_client(client, update)


def problem_of_weight(weight: float, training: LocalTraining, client: int) -> str:
    """Why a client's update cannot have this weight; empty if it has it. Other arguments as above."""
    is_uniform = training.aggregation is not None and training.aggregation.is_uniform
    samples = training.datamodule.train_samples[client]
    expected = 1 if is_uniform else weight_of(training.algorithm, client, samples, training.seed, training.datamodule)
    return "" if weight == expected else f"its weight is {weight}, but must be {expected}, as its samples say"


def problem_of(tensors: Tree, weight: float, initial: Tree) -> str:
    """Why tensors of a client cannot be used; empty if they can."""
    for name, tensor in tensors.items():
        known = initial.get(name)
        if "/" not in name and (known is None or known.shape != tensor.shape or known.dtype != tensor.dtype):
            return f"its {name[:100]} is not as in the server's model"
        if tensor.is_complex() and not any(known.is_complex() for known in initial.values()):
            return f"its {name[:100]} has complex numbers, but the model has none"
    try:
        check_finite([tensors], weight, initial)
    except NotFiniteError as error:
        return str(error)
    return ""


def evaluation_of(answer: Message, training: LocalTraining, client: int) -> ClientEvaluation | Failure:
    """A client's evaluation; arguments as in :func:`update_of`."""
    values, weights, without = answer.values, answer.tensors.get("gate_weights"), without_values(training, client)
    if values["metrics"].keys() != without.metrics.keys():
        return Failure(f"its metrics must be {', '.join(without.metrics) or 'none'}")
    if weights is not None and not _are_weights(weights, training.of(client).module):
        return Failure("its gate_weights are none of its model's gate")
    of_client = {name: values[name] for name in (*ACCURACIES, "validation_loss", "has_global_expert")}
    metrics = {name: values["metrics"][name] for name in without.metrics}
    return replace(without, **of_client, metrics=metrics, gate_weights=weights)


def without_values(training: LocalTraining, client: int) -> ClientEvaluation:
    """The evaluation of a client that sent none; arguments as in :func:`update_of`."""
    data = training.datamodule
    metrics = names_of(training.metrics, measures_loss(training.of(client).module, data))
    sizes = {"n_train": len(data.train_samples[client]), "n_test": len(data.test_samples[client])}
    return ClientEvaluation(client, **sizes, **dict.fromkeys(ACCURACIES, nan), metrics=dict.fromkeys(metrics, nan))


def _are_weights(weights: Tensor, module: LightningModule) -> bool:
    """Whether these are the mean weights of a module's gate, shape (1, experts)."""
    if not isinstance(module, MixtureOfExperts) or weights.dim() != 2 or weights.dtype != torch.float64:
        return False
    fits = len(weights) == 1 and weights.numel() and module.gate_width in (None, weights.shape[1])
    return bool(fits and ((weights >= 0) & weights.isfinite()).all())


def out_of_proportion(sent: Mapping[int, Tree], received: Mapping[int, Tree], most: float) -> dict[int, Failure]:
    """Why clients are left out whose tensors have changed much more than is usual.

    Usual is the median of the other clients that have changed anything, or the length of what the client received, if
    that is longer: so a client that learns is not left out among others that hardly do, and one that is alone in its
    round is compared, too. Where there is nothing to compare with, all is usual.
    """
    changes = {client: _length(tree, received.get(client, {})) for client, tree in sent.items()}
    failures = {}
    for client, change in changes.items():
        others = [other for of_other, other in changes.items() if other and of_other != client]
        before = _length({name: received.get(client, {}).get(name) for name in sent[client]})
        usual = max(median_high(others or [0.0]), before)
        if usual and change > most * usual:
            failures[client] = Failure(
                f"its change is {change:.3g} long, which is more than max_change, {most:g}, times the usual {usual:.3g}"
            )
    return failures


def _length(tree: Mapping[str, Tensor | None], before: Mapping[str, Tensor] | None = None) -> float:
    """The Euclidean length of what has changed in floating-point tensors; without ``before``, of these themselves."""
    lengths = []
    for name, tensor in tree.items():
        if tensor is None or not tensor.is_floating_point():
            continue
        values, known = tensor.double(), (before or {}).get(name)
        if known is not None and known.shape == values.shape:
            values = values - known.double()
        # a mask in a buffer may have infinite values, which are the same before and after
        values = values.where(tensor.isfinite(), 0.0)
        lengths.append(torch.linalg.vector_norm(values).item())
    return math.hypot(*lengths)
