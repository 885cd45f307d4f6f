"""Features: outputs of frozen parts that depend on the sample only, which steps look up instead of computing them."""

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
from fedmoe_pl.backends.client import on_device, trainable_names
from fedmoe_pl.backends.rounding import is_close
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.data import Batches, SampleBatches
from fedmoe_pl.models.layers import evaluating
from fedmoe_pl.trees import Tree

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
    training: LocalTraining, client: Client, constants: dict[str, Any], samples: Tensor
) -> FrozenParts | None:
    """Finds the frozen parts whose outputs depend on the sample only, by tracing the computation of one loss."""
    module = client.module
    samples = samples[:_TRACED_SAMPLES]
    batch = _batch(training, samples)
    with evaluating(module):
        run = partial(training.algorithm.client_loss, module, batch, constants)
        try:
            names = _called_with_known(module, training.frozen_modules, batch[0], run)  # the loss may need its Trainer
            if not names:
                return None
            expected = _loss_and_gradients(
                training, client, constants, batch
            )  # cuDNN's LSTM has no gradients in eval mode
            # one sample at a time, because an output that depends on other samples of the batch cannot be looked up
            rows = compute_rows(training, client, constants, samples, names, batch_size=1)
        except (RuntimeError, ValueError):
            return None
        if sum(table.nbytes for table in rows.values()) > _MOST_BYTES * batch[0].nbytes:
            return None
        with looked_up(module, names, rows):
            for reads_input in (False, True):
                x = batch[0] if reads_input else no_input(batch[0], batch[1].shape)
                try:
                    actual = _loss_and_gradients(training, client, constants, (x, batch[1]))
                except (RuntimeError, IndexError, ValueError, TypeError):
                    continue  # another part needs the samples
                if len(actual) == len(expected) and all(map(is_close, actual, expected)):
                    return FrozenParts(names, reads_input)
    return None


def _loss_and_gradients(
    training: LocalTraining, client: Client, constants: dict[str, Any], batch: tuple[Tensor, Tensor]
) -> list[Tensor]:
    """The loss of a batch, and its gradients by the trained parameters that it depends on."""
    loss = training.algorithm.client_loss(client.module, batch, constants)[0]
    names = set(trainable_names(training, client.module, client.round))
    trained = [parameter for name, parameter in client.module.named_parameters() if name in names]
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]


def compute_rows(
    training: LocalTraining,
    client: Client,
    constants: dict[str, Any],
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
                training.algorithm.client_loss(module, _batch(training, batch_samples), constants)
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


@dataclass(frozen=True)
class Features:
    """The outputs of frozen parts that a client's steps look up.

    Attributes:
        parts: the frozen submodules.
        rows: their outputs, one row per sample of the client, on the training's device.
    """

    parts: FrozenParts
    rows: Rows


class LookedUpBatches:
    """A client's batches, with the frozen parts' outputs for each; every iteration is one epoch."""

    def __init__(self, batches: SampleBatches, features: Features, lookup: Rows) -> None:
        assert isinstance(batches, Batches), "there are no features of samples that are read one by one"
        self.batches = batches
        self.features = features
        self.lookup = lookup

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterates over one epoch."""
        batches = self.batches
        samples = batches.samples.to(batches.x.device)
        labels = batches.y[batches.samples.to(batches.y.device)].to(batches.device)
        for places in batches.order().split(batches.batch_size):
            indices = places.to(batches.device)
            self.lookup.update({name: rows[indices] for name, rows in self.features.rows.items()})
            if self.features.parts.reads_input:
                x = batches.x[samples[places.to(samples.device)]].to(batches.device)
            else:
                x = no_input(batches.x, indices.shape).to(batches.device)
            yield x, labels[indices]


class FeatureCache:
    """Computes the features of one phase's clients, and keeps them for later rounds."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, FrozenParts], tuple[Tree, Tensor, Rows]] = {}

    def find(
        self, training: LocalTraining, client: Client, constants: dict[str, Any], samples: Tensor
    ) -> Features | None:
        """The features of a client that begins its local training; None if there are none to look up."""
        pays = training.max_epochs * training.rounds > 1
        datamodule = training.datamodule
        if not pays or datamodule.augmentation or datamodule.reader is not None or not training.frozen_modules:
            return None  # what is read one by one may be changed at random
        device = training.device
        half = training.trainer.get("precision") in ("bf16", "bf16-mixed")
        generators = [device] if device.type == "cuda" else []
        module, constants = client.module.to(device), on_device(constants, device)
        try:
            # Autocast as in training. A module that draws numbers even in eval mode must not change the client's.
            with torch.random.fork_rng(generators), torch.autocast(device.type, torch.bfloat16, enabled=half):
                parts = find_frozen_parts(training, client, constants, samples)
                return (
                    None if parts is None else Features(parts, self._rows(training, client, constants, samples, parts))
                )
        finally:
            module.cpu()

    def _rows(
        self, training: LocalTraining, client: Client, constants: dict[str, Any], samples: Tensor, parts: FrozenParts
    ) -> Rows:
        """The rows of a client; computed again only if the frozen parts or the samples have changed."""
        if training.rounds == 1:
            return compute_rows(training, client, constants, samples, parts.names)
        frozen_state = {
            name: tensor
            for name, tensor in client.module.state_dict().items()
            if any(name.startswith(f"{part}.") for part in parts.names)
        }
        kept_state, kept_samples, rows = self._kept.get((client.id, parts), ({}, samples, {}))
        same_state = kept_state.keys() == frozen_state.keys() and all(
            torch.equal(kept_state[name], tensor.cpu()) for name, tensor in frozen_state.items()
        )
        if not same_state or not torch.equal(kept_samples, samples):
            rows = compute_rows(training, client, constants, samples, parts.names)
            initial = training.initial
            state = {
                name: initial[name] if torch.equal(initial[name], tensor.cpu()) else tensor.detach().cpu().clone()
                for name, tensor in frozen_state.items()
            }
            self._kept[client.id, parts] = state, samples, rows
        return rows
