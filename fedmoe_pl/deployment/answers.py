"""Clients' answers as the server uses them; one that it cannot use is a failure of the client that sent it."""

from __future__ import annotations

from math import isnan, nan
from typing import Any, TypeGuard

import torch
from torch import Tensor

from fedmoe_pl.algorithms.client import Update
from fedmoe_pl.algorithms.overrides import overrides
from fedmoe_pl.backends import Failure, LocalTraining, NotFiniteError, check_finite
from fedmoe_pl.deployment.clients import AtClient
from fedmoe_pl.deployment.messages import Message
from fedmoe_pl.rounds.evaluation import METRICS, ClientEvaluation
from fedmoe_pl.rounds.metrics import measures_loss, names_of
from fedmoe_pl.trees import Tree

_OF_EVALUATION = {"client", "n_train", "gate_weights", "gate_labels", "validation_loss", "has_global_expert", "metrics"}


def cannot_be_used(what: str, error: Exception) -> Failure:
    """The failure of a client whose values made the server's computation raise an exception."""
    return Failure(f"its {what} cannot be used ({' '.join(f'{type(error).__name__}: {error}'.split())[:200]})")


def update_of(answer: Message, training: LocalTraining, client: int) -> Update | Failure:
    """A client's update.

    Args:
        answer: its answer.
        training: the local training of the phase's clients.
        client: the client's id.
    """
    weight, keeps = answer.values.get("weight"), answer.values.get("keeps")
    if answer.kind != "update" or not _is_number(weight) or not _is_file(keeps):
        return Failure("its answer is no update")
    if weight < 0:
        return Failure(f"its weight is {weight}")
    if missing := [name for name in _sent_by_all(training) if name not in answer.tensors]:
        return Failure(f"its update has no {missing[0]}")
    if reason := problem_of(answer.tensors, weight, training.of(client).initial):
        return Failure(reason)
    update, aggregation = Update(answer.tensors, weight, AtClient(keeps)), training.aggregation
    return update if aggregation is None else aggregation.of_remote_client(client, update)


def _sent_by_all(training: LocalTraining) -> list[str]:
    """Names that are in every update, as far as the server can know: an algorithm may send others in its own way."""
    algorithm = training.algorithm
    own_way = overrides(algorithm, "client_final") and training.aggregation is None
    return [] if own_way else [name for name in training.initial if algorithm.is_shared(name)]


def problem_of(tensors: Tree, weight: float, initial: Tree) -> str:
    """Why tensors of a client cannot be used; empty if they can.

    Args:
        tensors: the tensors; an algorithm's own, with a "/" in their names, may have any shape.
        weight: the client's weight in the aggregation.
        initial: the phase's initial tensors for this client.
    """
    for name, tensor in tensors.items():
        known = initial.get(name)
        if "/" not in name and (known is None or known.shape != tensor.shape or known.dtype != tensor.dtype):
            return f"its {name} is not as in the server's model"
    try:
        check_finite([tensors], weight, initial)
    except NotFiniteError as error:
        return str(error)
    return ""


def kept_of(answer: Message) -> AtClient | Failure:
    """What a client says that it keeps."""
    keeps = answer.values.get("keeps")
    if answer.kind != "kept" or not _is_file(keeps):
        return Failure("its answer does not say whether it keeps anything")
    return AtClient(keeps)


def evaluation_of(answer: Message, training: LocalTraining, client: int) -> ClientEvaluation | Failure:
    """A client's evaluation; arguments as in :func:`update_of`."""
    values, weights, names = answer.values, answer.tensors.get("gate_weights"), _metric_names(training, client)
    metrics = values.get("metrics")
    fits = (
        answer.kind == "evaluation"
        and values.keys() == {*_OF_EVALUATION, *METRICS}
        and all(_is_number(values[name]) and (isnan(values[name]) or 0 <= values[name] <= 1) for name in METRICS)
        and _is_number(values["validation_loss"])
        and isinstance(values["has_global_expert"], bool)
        and isinstance(metrics, dict)
        and metrics.keys() == {*names}
        and all(_is_number(value) for value in metrics.values())
        and (weights is None or _are_weights(weights))
    )
    if not fits:
        return Failure("its answer is no evaluation")
    of_client = {name: values[name] for name in (*METRICS, "validation_loss", "has_global_expert")}
    of_client |= {"metrics": {name: values["metrics"][name] for name in names}, "gate_weights": weights}
    return ClientEvaluation(client, len(training.datamodule.train_samples[client]), **of_client)


def without_values(training: LocalTraining, client: int) -> ClientEvaluation:
    """The evaluation of a client that sent none; arguments as in :func:`update_of`."""
    metrics = dict.fromkeys(_metric_names(training, client), nan)
    return ClientEvaluation(client, len(training.datamodule.train_samples[client]), nan, nan, nan, nan, metrics=metrics)


def _metric_names(training: LocalTraining, client: int) -> list[str]:
    """Names of the metrics that a client evaluates beside accuracies."""
    return names_of(training.metrics, measures_loss(training.of(client).module, training.datamodule))


def _is_file(value: Any) -> TypeGuard[int]:
    """Whether it is the number of a file, or 0 for none."""
    return type(value) is int and value >= 0


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_weights(weights: Tensor) -> bool:
    """Whether these are the mean weights of a gate, shape (1, experts)."""
    return weights.dim() == 2 and len(weights) == 1 and weights.dtype == torch.float64 and bool((weights >= 0).all())
