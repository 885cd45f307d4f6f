"""Frozen parts are computed once: their outputs depend on the sample alone (DESIGN section 4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedmoe_pl.algorithms.algorithm import Client
from fedmoe_pl.backends.backend import LocalTraining
from fedmoe_pl.backends.client import on_device, trainable_names
from fedmoe_pl.data import Batches
from fedmoe_pl.trees import Tree

_BATCH_SIZE = 500
_TRACED_SAMPLES = 3
_NOISE = 100  # roundings of the largest value that a sum of such values may be off by
_MOST_BYTES = 4  # of rows, for every byte of the samples: what is kept must not outgrow the data by much

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
    samples = samples[:_TRACED_SAMPLES]
    batch = _batch(training, samples)
    trainable = set(trainable_names(training, module, client.round))

    def loss_and_gradients(x: Tensor) -> list[Tensor]:
        loss = algorithm.client_loss(module, (x, batch[1]), const)[0]
        trained = [parameter for name, parameter in module.named_parameters() if name in trainable]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]

    with _evaluating(module):
        run = partial(algorithm.client_loss, module, batch, const)
        names = _called_with_known(module, training.frozen_modules, batch[0], run)
        if not names:
            return None
        expected = loss_and_gradients(batch[0])
        try:
            # one by one, because an output that depends on the rest of its batch cannot be looked up
            rows = compute_rows(training, client, const, samples, names, batch_size=1)
        except (RuntimeError, ValueError):
            return None
        if sum(table.nbytes for table in rows.values()) > _MOST_BYTES * batch[0].nbytes:
            return None
        with looked_up(module, names, rows):
            for reads_input in (False, True):
                x = batch[0] if reads_input else no_input(batch[0], batch[1].shape)
                try:
                    found = loss_and_gradients(x)
                except (RuntimeError, IndexError, ValueError, TypeError):
                    continue  # something needs what is not there
                if len(found) == len(expected) and all(map(is_close, found, expected)):
                    return FrozenParts(names, reads_input)
    return None


def is_close(a: Tensor | None, b: Tensor | None, largest_of_all: float = 0.0) -> bool:
    """Whether two ways to compute the same differ by rounding only; a GPU may round the factors of a convolution.

    Args:
        a: one result.
        b: the other.
        largest_of_all: the largest absolute value that was computed with them. Where a sum of such values is zero,
            all of ``a`` and ``b`` is what rounding left of it, as in the gradient of a bias before a normalization.
    """
    if a is None or b is None or a.shape != b.shape:
        return a is b
    if not a.is_floating_point():
        return torch.equal(a, b)
    relative = 1e-2 if a.device.type == "cuda" else 1000 * torch.finfo(a.dtype).eps
    largest = largest_value([b])
    noise = _NOISE * torch.finfo(a.dtype).eps * largest_of_all
    return torch.allclose(a, b, rtol=0, atol=max(relative * max(largest, 1e-3), noise), equal_nan=True)


def largest_value(tensors: Iterable[Tensor | None]) -> float:
    """The largest finite absolute value of some tensors; 0 where there is none."""
    values = [tensor.abs().nan_to_num(0, 0).max().item() for tensor in tensors if tensor is not None and tensor.numel()]
    return max(values, default=0.0)


def compute_rows(
    training: LocalTraining,
    client: Client,
    const: dict[str, Any],
    samples: Tensor,
    names: tuple[str, ...],
    batch_size: int = _BATCH_SIZE,
) -> Rows:
    """Outputs of the named submodules for some samples, in their order."""
    module = client.module
    rows: dict[str, list[Tensor]] = {name: [] for name in names}

    def remember(name: str, part: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
        rows[name].append(output.detach())

    hooks = [module.get_submodule(name).register_forward_hook(partial(remember, name)) for name in names]
    try:
        with _evaluating(module), torch.no_grad():
            for some in samples.split(batch_size):
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


def _called_with_known(
    module: nn.Module, frozen: frozenset[str], x: Tensor, run: Callable[[], object]
) -> tuple[str, ...]:
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
    """Finds the features of one phase's clients, and keeps them from round to round."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, FrozenParts], tuple[Tree, Tensor, Rows]] = {}

    def find(self, training: LocalTraining, client: Client, const: dict[str, Any], samples: Tensor) -> Features | None:
        """The features of a client that begins its local training; None if there are none to look up.

        Args:
            training: what all clients of the phase and of this client's architecture have in common.
            client: the client.
            const: the constants of its loss.
            samples: indices of the samples that it trains on.
        """
        pays = training.max_epochs * training.rounds > 1
        if not pays or training.datamodule.augmentation or not training.frozen_modules:
            return None
        device = training.device
        half = training.trainer.get("precision") in ("bf16", "bf16-mixed")
        generators = [device] if device.type == "cuda" else []
        module, const = client.module.to(device), on_device(const, device)
        try:
            # as in training; and what a module draws in eval mode must not be missing from the client's numbers
            with torch.random.fork_rng(generators), torch.autocast(device.type, torch.bfloat16, enabled=half):
                parts = find_frozen_parts(training, client, const, samples)
                return None if parts is None else Features(parts, self._rows(training, client, const, samples, parts))
        finally:
            module.cpu()

    def _rows(
        self, training: LocalTraining, client: Client, const: dict[str, Any], samples: Tensor, parts: FrozenParts
    ) -> Rows:
        if training.rounds == 1:
            return compute_rows(training, client, const, samples, parts.names)
        now = {
            name: tensor
            for name, tensor in client.module.state_dict().items()
            if any(name.startswith(f"{part}.") for part in parts.names)
        }
        before, of, rows = self._kept.get((client.id, parts), ({}, samples, {}))
        same = before.keys() == now.keys() and all(torch.equal(before[name], now[name].cpu()) for name in now)
        if not same or not torch.equal(of, samples):
            rows = compute_rows(training, client, const, samples, parts.names)
            initial = training.initial
            state = {
                name: initial[name] if torch.equal(initial[name], tensor.cpu()) else tensor.detach().cpu().clone()
                for name, tensor in now.items()
            }
            self._kept[client.id, parts] = state, samples, rows
        return rows
