"""Frozen parts are computed once: their outputs depend on the sample alone (DESIGN section 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedmoe_pl.algorithm import Client
from fedmoe_pl.backends.backend import LocalTraining
from fedmoe_pl.data import Batches

_BATCH_SIZE = 500
_TRACED_SAMPLES = 3

Rows = dict[str, Tensor]
"""Outputs of frozen submodules by their names, one row per sample."""


@dataclass(frozen=True)
class FrozenParts:
    """Submodules whose outputs can be looked up in place of being computed in every step.

    Attributes:
        names: of the submodules.
        reads_input: whether anything else reads the samples themselves.
    """

    names: tuple[str, ...]
    reads_input: bool


def find_frozen_parts(
    training: LocalTraining, client: Client, const: dict[str, Any], samples: Tensor
) -> FrozenParts | None:
    """Finds what a phase trains nothing below and nothing random happens before, by tracing one loss.

    Args:
        training: what all clients of the phase have in common.
        client: any client, as it begins its local training.
        const: the constants of its loss.
        samples: indices of the samples that it trains on.

    Returns:
        The outermost frozen submodules that are called with the samples, or with outputs of such submodules; None if
        there are none, if it would not pay or if the loss does not come out the same with looked-up outputs.
    """
    module, algorithm = client.module, training.algorithm
    pays = training.max_epochs * training.rounds > 1
    if not pays or training.datamodule.augmentation or algorithm.frozen_train_mode:
        return None
    frozen = {name for name, part in module.named_modules() if name and _is_frozen(part, name, training.frozen)}
    if not frozen:
        return None
    batch = _batch(training, samples[:_TRACED_SAMPLES])

    def loss_and_gradients(x: Tensor) -> list[Tensor]:
        loss = algorithm.client_loss(module, (x, batch[1]), const)[0]
        trained = [p for name, p in module.named_parameters() if name not in training.frozen and p.requires_grad]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]

    with _evaluating(module):
        names = _called_with_known(module, frozen, batch[0], lambda: algorithm.client_loss(module, batch, const))
        if not names:
            return None
        expected = loss_and_gradients(batch[0])
        rows = compute_rows(training, client, const, samples[:_TRACED_SAMPLES], names)
        with looked_up(module, names, rows):
            for reads_input in (False, True):
                x = batch[0] if reads_input else no_input(batch[0], batch[1].shape)
                try:
                    found = loss_and_gradients(x)
                except (RuntimeError, IndexError, ValueError, TypeError):
                    continue  # something needs what is not there
                if len(found) == len(expected) and all(map(_close, found, expected)):
                    return FrozenParts(names, reads_input)
    return None


def compute_rows(
    training: LocalTraining, client: Client, const: dict[str, Any], samples: Tensor, names: tuple[str, ...]
) -> Rows:
    """Outputs of the named submodules for some samples, in their order."""
    module = client.module
    rows: dict[str, list[Tensor]] = {name: [] for name in names}

    def remember(name: str, part: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        rows[name].append(output.detach())

    hooks = [module.get_submodule(name).register_forward_hook(partial(remember, name)) for name in names]
    try:
        with _evaluating(module), torch.no_grad():
            for some in samples.split(_BATCH_SIZE):
                training.algorithm.client_loss(module, _batch(training, some), const)
    finally:
        _remove(hooks)
    return {name: torch.cat(outputs) for name, outputs in rows.items()}


@contextmanager
def looked_up(module: nn.Module, names: tuple[str, ...], lookup: Rows) -> Iterator[None]:
    """Lets the named submodules return what is in ``lookup`` under their name, whatever they are called with."""
    parts = [module.get_submodule(name) for name in names]
    for name, part in zip(names, parts, strict=True):
        part.forward = partial(_look_up, lookup, name)
    try:
        yield
    finally:
        for part in parts:
            del part.forward


def no_input(x: Tensor, shape: Sequence[int]) -> Tensor:
    """Stands for samples that nothing reads: of their type, shape (*shape, 0)."""
    return x.new_empty(*shape, 0)


def _look_up(lookup: Rows, name: str, *inputs: Tensor) -> Tensor:
    return lookup[name]


def _is_frozen(part: nn.Module, name: str, frozen: frozenset[str]) -> bool:
    names = [f"{name}.{own}" for own in part.state_dict()]
    return bool(names) and all(own in frozen for own in names)


def _called_with_known(module: nn.Module, frozen: set[str], x: Tensor, run: Callable[[], object]) -> tuple[str, ...]:
    """Names of the frozen submodules that are called once, with the samples or outputs of such submodules alone."""
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


@contextmanager
def _evaluating(module: LightningModule) -> Iterator[None]:
    """Switches off what is random, which would draw from the client's random numbers."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-6)


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


@dataclass(frozen=True)
class Features:
    """What a client's steps look up in place of computing it.

    Attributes:
        parts: the frozen submodules.
        rows: their outputs for the client's samples, on the training's device.
    """

    parts: FrozenParts
    rows: Rows


class LookedUpBatches:
    """A client's batches in which the frozen parts' outputs are looked up: an epoch each time it is iterated.

    Args:
        batches: the client's batches, not augmented.
        features: what is looked up, one row per sample of the client.
        lookup: where the frozen parts look for it.
    """

    def __init__(self, batches: Batches, features: Features, lookup: Rows) -> None:
        self.batches = batches
        self.features = features
        self.lookup = lookup

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Iterates over one epoch."""
        batches = self.batches
        samples = batches.samples.to(batches.x.device)
        labels = batches.y[batches.samples.to(batches.y.device)].to(batches.device)
        for places in batches.order().split(batches.batch_size):
            here = places.to(batches.device)
            self.lookup.update({name: rows[here] for name, rows in self.features.rows.items()})
            if self.features.parts.reads_input:
                x = batches.x[samples[places.to(samples.device)]].to(batches.device)
            else:
                x = no_input(batches.x, here.shape).to(batches.device)
            yield x, labels[here]


class FeatureCache:
    """Finds the clients' features, and keeps them from round to round of a phase."""

    def __init__(self) -> None:
        self._training: LocalTraining | None = None
        self._kept: dict[tuple[int, FrozenParts], tuple[Tensor, Rows]] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Nothing, because a worker process computes its own."""
        return {"_training": None, "_kept": {}}

    def find(self, training: LocalTraining, client: Client, const: dict[str, Any], samples: Tensor) -> Features | None:
        """The features of a client that begins its local training; None if there are none to look up."""
        if training is not self._training:
            self._training, self._kept = training, {}
        module = client.module.to(training.device)
        parts = find_frozen_parts(training, client, const, samples)
        if parts is None:
            module.cpu()
            return None
        before, rows = self._kept.get((client.id, parts), (None, {}))
        if before is None or not torch.equal(before, samples):
            rows = compute_rows(training, client, const, samples, parts.names)
            if training.rounds > 1:
                self._kept[client.id, parts] = samples, rows
        module.cpu()
        return Features(parts, rows)
