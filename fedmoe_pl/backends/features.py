"""Features: outputs of frozen parts that depend on the sample only, which steps look up instead of computing them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedmoe_pl.algorithms.algorithm import overrides
from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.backends.local_client import on_device, trainable_names
from fedmoe_pl.backends.rounding import in_full_precision, is_close
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.data import Batches, SampleBatches
from fedmoe_pl.models.layers import computes_more, evaluating, has_own_train, replaced_forward
from fedmoe_pl.trees import Tree, changed, of_parts

_BATCH_SIZE = 500
_TRACED_SAMPLES = 3
_MOST_BYTES = 4  # most bytes of rows per byte of samples, so that rows do not need much more memory than the data

Rows = dict[str, Tensor]
"""Outputs of frozen submodules by name, one row per sample."""


@dataclass(frozen=True)
class FrozenParts:
    """Submodules whose outputs can be looked up in every step, and whether other parts read the samples, too."""

    names: tuple[str, ...]
    reads_input: bool


@dataclass(frozen=True)
class Features:
    """The outputs of frozen parts that a client's steps look up: a row for each of its samples, on its device."""

    parts: FrozenParts
    rows: Rows


class FeatureCache:
    """Computes the features of one phase's clients, and keeps them for later rounds."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, FrozenParts], tuple[Tree, Tensor, Rows]] = {}
        self._too_large: set[int] = set()  # architectures whose frozen parts have larger outputs than is worth keeping

    def find(
        self, training: LocalTraining, client: Client, constants: dict[str, Any], samples: Tensor
    ) -> Features | None:
        """The features of a client that begins its local training; None if there are none to look up."""
        pays = training.max_epochs * training.rounds > 1
        datamodule, device = training.datamodule, training.device
        if not pays or datamodule.augmentation or datamodule.reader is not None or not training.frozen_in_use:
            return None  # what is read one by one may be changed at random
        if has_own_train(client.module) or overrides(training.algorithm, "client_batches"):
            return None
        architecture = training.architecture(client.id)
        if architecture in self._too_large:
            return None
        try:
            module = training.copies.move(client.module, device)
            tracing = _Tracing(training, module, client.round, on_device(constants, device))
            # Autocast as in training. A module that draws numbers even in eval mode must not change the client's.
            with (
                torch.random.fork_rng([device] if device.type == "cuda" else []),
                torch.autocast(device.type, torch.bfloat16, enabled=training.in_half_precision),
                evaluating(client.module),
            ):
                parts = tracing.find(samples)
                return None if parts is None else Features(parts, self._rows(tracing, client.id, samples, parts))
        except _TooLargeError:
            self._too_large.add(architecture)
            return None
        finally:
            training.copies.move(client.module, torch.device("cpu"))

    def _rows(self, tracing: _Tracing, client_id: int, samples: Tensor, parts: FrozenParts) -> Rows:
        """The rows of a client; computed again only if the frozen parts or the samples have changed."""
        if tracing.training.rounds == 1:
            return tracing.rows(samples, parts.names)
        kept, kept_samples, rows = self._kept.get((client_id, parts), ({}, None, {}))
        tensors = of_parts(tracing.module.state_dict(keep_vars=True), parts.names)
        state = changed(tensors, tracing.training.initial, kept)
        is_same = kept_samples is not None and torch.equal(kept_samples, samples) and state.keys() == kept.keys()
        if not is_same or any(state[name] is not kept[name] for name in kept):
            rows = tracing.rows(samples, parts.names)
            self._kept[client_id, parts] = state, samples, rows
        return rows


class _TooLargeError(Exception):
    """The outputs of frozen parts need too much memory, whichever client's they are."""


@dataclass(frozen=True)
class _Tracing:
    """A client's module in eval mode, whose frozen parts are found by computing losses of some samples."""

    training: LocalTraining
    module: LightningModule
    round: int
    constants: dict[str, Any]

    @in_full_precision()
    def find(self, samples: Tensor) -> FrozenParts | None:
        """Finds the frozen parts whose outputs depend on the sample only."""
        samples = samples[:_TRACED_SAMPLES]
        x, y = self._batch(samples)
        try:
            names = self._called_with_known(x, y)  # the loss may need its Trainer
            if not names:
                return None
            expected = self._loss_and_gradients(x, y)  # cuDNN's LSTM has no gradients in eval mode
            # one sample at a time, because an output that depends on other samples of the batch cannot be looked up
            rows = self.rows(samples, names, batch_size=1)
        except _TooLargeError:
            raise
        except Exception:  # also of the user's code, which may refuse a single sample
            return None
        with looked_up(self.module, names, rows):
            for reads_input in (False, True):
                try:
                    actual = self._loss_and_gradients(x if reads_input else no_input(x, y.shape), y)
                except Exception:  # whatever another part says to samples without values, which it needs
                    continue
                if len(actual) == len(expected) and all(map(is_close, actual, expected)):
                    return FrozenParts(names, reads_input)
        return None

    def rows(self, samples: Tensor, names: Sequence[str], batch_size: int = _BATCH_SIZE) -> Rows:
        """Outputs of the named submodules for some samples, in the order of the samples."""
        rows: dict[str, list[Tensor]] = {name: [] for name in names}

        def remember(name: str, part: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            rows[name].append(output.detach())

        with ExitStack() as hooks, torch.no_grad():
            for name in names:
                hooks.enter_context(self.module.get_submodule(name).register_forward_hook(partial(remember, name)))
            for batch_samples in samples.split(batch_size):
                self._loss(*self._batch(batch_samples))
        return {name: torch.cat(outputs) for name, outputs in rows.items()}

    def _batch(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        device = self.training.device
        (batch,) = self.training.datamodule.batches(samples, batch_size=len(samples), device=device)
        return batch

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.training.algorithm.client_loss(self.module, (x, y), self.constants)

    def _loss_and_gradients(self, x: Tensor, y: Tensor) -> list[Tensor]:
        """The loss of a batch, and its gradients by the trained parameters that it depends on."""
        loss, names = self._loss(x, y), {*trainable_names(self.training, self.module, self.round)}
        trained = [parameter for name, parameter in self.module.named_parameters() if name in names]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        return [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]

    def _called_with_known(self, x: Tensor, y: Tensor) -> tuple[str, ...]:
        """Names of the frozen parts called once, whose inputs are the samples or outputs of such parts only.

        Raises:
            _TooLargeError: if their outputs have many more bytes than the samples.
        """
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

        frozen = {name: self.module.get_submodule(name) for name in self.training.frozen_in_use}
        # a base whose layers have adapters computes more; found before there are hooks of this method
        parts = {name: part for name, part in frozen.items() if not computes_more(part)}
        with ExitStack() as hooks:
            for name, part in parts.items():
                hooks.enter_context(part.register_forward_pre_hook(partial(before, name)))
                hooks.enter_context(part.register_forward_hook(partial(after, name)))
            self._loss(x, y)
        names = tuple(name for name in calls if calls.count(name) == 1)
        outputs = zip(calls, known[1:], strict=True)
        if sum(output.nbytes for name, output in outputs if name in names) > _MOST_BYTES * x.nbytes:
            raise _TooLargeError
        return names


@contextmanager
def looked_up(module: nn.Module, names: Sequence[str], lookup: Rows) -> Iterator[None]:
    """In this context, each named submodule returns the tensor under its name in ``lookup``, whatever its input."""
    with ExitStack() as replaced:
        for name in names:
            replaced.enter_context(replaced_forward(module.get_submodule(name), partial(_look_up, lookup, name)))
        yield


def _look_up(lookup: Rows, name: str, *inputs: Tensor) -> Tensor:
    return lookup[name]


def no_input(x: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty tensor in place of samples that no part reads: of their type, shape (*shape, 0)."""
    return x.new_empty(*shape, 0)


class LookedUpBatches:
    """A client's batches, with the frozen parts' outputs for each in ``lookup``; every iteration is one epoch."""

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
        for places in batches.places():
            indices = places.to(batches.device)
            self.lookup.update({name: rows[indices] for name, rows in self.features.rows.items()})
            if self.features.parts.reads_input:
                x = batches.x[samples[places.to(samples.device)]].to(batches.device)
            else:
                x = no_input(batches.x, indices.shape).to(batches.device)
            yield x, labels[indices]
