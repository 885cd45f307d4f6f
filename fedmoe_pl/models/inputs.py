"""Inputs of models: a tensor, or a dict of keyword arguments, as Hugging Face's models and collators have them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.func import functional_call

from fedmoe_pl.checks import InvalidArgumentError, with_article
from fedmoe_pl.data import is_pair
from fedmoe_pl.models.mixtures.tasks import OF_CLASSES, Task
from fedmoe_pl.trees import Tree

Inputs = Tensor | Mapping[str, Any]
"""A tensor (B, ...), or a dict of tensors (B, ...) by the names of the model's arguments."""


def inputs_and_targets(batch: Any, target_key: str = "labels", task: Task = "multiclass") -> tuple[Any, Any]:
    """The inputs and the targets of a batch: a pair as it is; of a dict, the values under all other keys and one key.

    If targets are classes, those of padding tokens, where ``attention_mask`` is 0, become -100, which does not count.

    Raises:
        MisconfigurationException: if the batch is neither a pair nor a dict with the key.
    """
    if is_pair(batch):
        return batch[0], _without_padding(batch[0], batch[1], task)
    if not isinstance(batch, Mapping):
        raise MisconfigurationException(
            f"A batch is {with_article(type(batch).__name__)}, but mixtures need pairs of inputs and targets, or dicts."
        )
    if target_key not in batch:
        allowed = f"a key of the batches ({', '.join(map(str, batch))})"
        raise InvalidArgumentError("MixtureOfExperts", "target_key", target_key, allowed)
    x = inputs_of(batch, target_key)
    return x, _without_padding(x, batch[target_key], task)


def _without_padding(x: Inputs, y: Any, task: Task) -> Any:
    mask = x.get("attention_mask") if isinstance(x, Mapping) and task in OF_CLASSES else None
    is_of_tokens = isinstance(mask, Tensor) and isinstance(y, Tensor) and mask.shape == y.shape
    return y.masked_fill(mask == 0, -100) if is_of_tokens and not y.is_floating_point() else y


def inputs_of(batch: Any, target_key: str = "labels") -> Any:
    """The inputs of a batch that may lack targets: a tensor, the first item of a pair, or a dict without the key."""
    if isinstance(batch, Mapping):
        return {key: value for key, value in batch.items() if key != target_key}
    return batch if isinstance(batch, Tensor) else batch[0]


def call(part: nn.Module, x: Inputs, tensors: Tree | None = None) -> Tensor:
    """The output of a module for inputs; of an output like that of a transformers model, its ``logits``.

    A dict gives the keyword arguments. ``tensors`` take the place of the module's own.

    Raises:
        TypeError: if the output is neither a tensor nor has ``logits``.
    """
    arguments, options = ((), dict(x)) if isinstance(x, Mapping) else ((x,), {})
    if tensors is None:
        output = part(*arguments, **options)
    else:
        output = functional_call(part, tensors, arguments, options)
    return logits_of(output, part)


def logits_of(output: Any, part: nn.Module) -> Tensor:
    """What a module has returned, if it is a tensor, or else its ``logits``."""
    output = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if not isinstance(output, Tensor):
        raise TypeError(
            f"{with_article(type(part).__name__)} must return a tensor, or an output with a tensor as 'logits'"
        )
    return output


def rows_of(x: Inputs, rows: slice) -> Inputs:
    """Some samples of inputs."""
    if isinstance(x, Tensor):
        return x[rows]
    return {key: value[rows] if isinstance(value, Tensor) and value.dim() else value for key, value in x.items()}


def first_tensor(x: Inputs) -> Tensor:
    """The inputs, or of a dict the first tensor with a row for each sample."""
    if isinstance(x, Tensor):
        return x
    if not isinstance(x, Mapping):
        given = with_article(type(x).__name__)
        raise MisconfigurationException(f"Inputs are {given}, but mixtures need a tensor, or a dict of tensors.")
    found = (value for value in x.values() if isinstance(value, Tensor) and value.dim())
    if (tensor := next(found, None)) is None:
        raise MisconfigurationException(f"Inputs with the keys {', '.join(map(str, x))} have no tensor of samples.")
    return tensor


def batch_size_of(x: Inputs) -> int:
    """Number of samples of inputs.

    Example:
        >>> import torch
        >>> batch_size_of({"input_ids": torch.zeros(3, 8), "attention_mask": torch.ones(3, 8)})
        3
    """
    return first_tensor(x).shape[0]  # torch.export would take what `len` returns for a constant
