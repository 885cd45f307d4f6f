"""Frozen parts of a model whose outputs depend on the sample only, so that they need to be computed only once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.backends.client import trainable_names
from fedmoe_pl.backends.rounding import is_close
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.models.layers import evaluating

_BATCH_SIZE = 500
_TRACED_SAMPLES = 3
_MOST_BYTES = 4  # most bytes of rows per byte of samples, so that rows do not need much more memory than the data

Rows = dict[str, Tensor]
"""Outputs of frozen submodules by name, one row per sample."""


@dataclass(frozen=True)
class FrozenParts:
    """Submodules whose outputs can be looked up in every step instead of being computed.

    Attributes:
        names: names of the submodules.
        reads_input: whether other parts of the model read the samples, too.
    """

    names: tuple[str, ...]
    reads_input: bool


def find_frozen_parts(
    training: LocalTraining, client: Client, const: dict[str, Any], samples: Tensor
) -> FrozenParts | None:
    """Finds the frozen parts whose outputs depend on the sample only, by tracing the computation of one loss.

    Args:
        training: the local training of the phase's clients.
        client: any client, before its local training.
        const: the constants of its loss.
        samples: indices of the samples that it trains on.

    Returns:
        The outermost frozen submodules whose inputs are the samples or outputs of other such submodules; None if there
        are none, if their outputs are too large, or if looking them up would change the loss or its gradients.
    """
    module = client.module
    samples = samples[:_TRACED_SAMPLES]
    batch = _batch(training, samples)
    with evaluating(module):
        run = partial(training.algorithm.client_loss, module, batch, const)
        try:
            names = _called_with_known(module, training.frozen_modules, batch[0], run)  # the loss may need its Trainer
            if not names:
                return None
            expected = _loss_and_gradients(training, client, const, batch)  # cuDNN's LSTM has no gradients in eval mode
            # one sample at a time, because an output that depends on other samples of the batch cannot be looked up
            rows = compute_rows(training, client, const, samples, names, batch_size=1)
        except (RuntimeError, ValueError):
            return None
        if sum(table.nbytes for table in rows.values()) > _MOST_BYTES * batch[0].nbytes:
            return None
        with looked_up(module, names, rows):
            for reads_input in (False, True):
                x = batch[0] if reads_input else no_input(batch[0], batch[1].shape)
                try:
                    actual = _loss_and_gradients(training, client, const, (x, batch[1]))
                except (RuntimeError, IndexError, ValueError, TypeError):
                    continue  # another part needs the samples
                if len(actual) == len(expected) and all(map(is_close, actual, expected)):
                    return FrozenParts(names, reads_input)
    return None


def _loss_and_gradients(
    training: LocalTraining, client: Client, const: dict[str, Any], batch: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """The loss of a batch, and its gradients by the trained parameters that it depends on."""
    loss = training.algorithm.client_loss(client.module, batch, const)[0]
    names = set(trainable_names(training, client.module, client.round))
    trained = [parameter for name, parameter in client.module.named_parameters() if name in names]
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


def compute_rows(
    training: LocalTraining,
    client: Client,
    const: dict[str, Any],
    samples: Tensor,
    names: tuple[str, ...],
    batch_size: int = _BATCH_SIZE,
) -> Rows:
    """Outputs of the named submodules for some samples, in the order of the samples."""
    module = client.module
    rows: dict[str, list[Tensor]] = {name: [] for name in names}

    def remember(name: str, part: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        rows[name].append(output.detach())

    hooks = [module.get_submodule(name).register_forward_hook(partial(remember, name)) for name in names]
    try:
        with evaluating(module), torch.no_grad():
            for batch_samples in samples.split(batch_size):
                training.algorithm.client_loss(module, _batch(training, batch_samples), const)
    finally:
        _remove(hooks)
    return {name: torch.cat(outputs) for name, outputs in rows.items()}


@contextmanager
def looked_up(module: nn.Module, names: tuple[str, ...], lookup: Rows) -> Iterator[None]:
    """In this context, each named submodule returns the tensor under its name in ``lookup``, whatever its input."""
    parts = [module.get_submodule(name) for name in names]
    for name, part in zip(names, parts, strict=True):
        part.forward = partial(_look_up, lookup, name)
    try:
        yield
    finally:
        for part in parts:
            del part.forward


def no_input(x: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty tensor in place of samples that no part reads: of their type, shape (*shape, 0)."""
    return x.new_empty(*shape, 0)


def _look_up(lookup: Rows, name: str, *inputs: Tensor) -> Tensor:
    return lookup[name]


def _called_with_known(
    module: nn.Module, frozen: frozenset[str], x: Tensor, run: Callable[[], object]
) -> tuple[str, ...]:
    """Names of the frozen submodules called once, whose inputs are the samples or outputs of such submodules only."""
    known, calls, inside = [x], [], []

    def before(name: str, part: nn.Module, arguments: tuple[Any, ...]) -> None:
        if not inside and all(any(argument is tensor for tensor in known) for argument in arguments):
            inside.append(name)

    def after(name: str, part: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
        if inside == [name]:
            inside.clear()
            if isinstance(output, Tensor) and len(output) == len(x):
                known.append(output)
                calls.append(name)

    hooks: list[RemovableHandle] = []
    for name in frozen:
        part = module.get_submodule(name)
        hooks += [
            part.register_forward_pre_hook(partial(before, name)),
            part.register_forward_hook(partial(after, name)),
        ]
    try:
        run()
    finally:
        _remove(hooks)
    return tuple(name for name in calls if calls.count(name) == 1)


def _batch(training: LocalTraining, samples: Tensor) -> tuple[Tensor, Tensor]:
    (batch,) = training.datamodule.batches(samples, batch_size=len(samples), device=training.device)
    return batch


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
