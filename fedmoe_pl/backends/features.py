"""Features: outputs of frozen parts that depend only on the sample, so that steps look them up."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedmoe_pl.algorithms.client import Client
from fedmoe_pl.backends.code_of_user import branches, code_in_losses
from fedmoe_pl.backends.freezing import Freezing
from fedmoe_pl.backends.local_client import on_device
from fedmoe_pl.backends.rounding import in_full_precision, is_close
from fedmoe_pl.backends.training import LocalTraining
from fedmoe_pl.data import Batches, SampleBatches
from fedmoe_pl.models.layers import computes_more, has_own_train, replaced_forward
from fedmoe_pl.seeds import seed_all, seeded
from fedmoe_pl.trees import Tree, changed, copy_module, is_borrowed, of_parts, same_bits, version_of

_BATCH_SIZE = 500
_TRACED_SAMPLES = 3
_MOST_TIMES_SAMPLES = 4  # rows may take so many times the bytes of the samples


@dataclass(frozen=True)
class FrozenParts:
    """Submodules whose outputs can be looked up in every step, and whether other parts also read the samples."""

    names: tuple[str, ...]
    reads_input: bool


@dataclass(frozen=True)
class Features:
    """The outputs of frozen parts that a client's steps look up: a row for each of its samples, on the device."""

    parts: FrozenParts
    rows: Tree


class FeatureCache:
    """Computes the features of one phase's clients, and keeps them for later rounds.

    A client has features if PyTorch or this package wrote what computes losses, apart from experts and gates
    (``code_in_losses``), if these compute all batches in the same way (``branches``), if a trial with some samples
    finds frozen parts that read nothing but samples and each other's outputs, and if these outputs are not too large.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[int, FrozenParts], tuple[Tree, Tensor, Tree]] = {}
        self._looks_up: dict[int, bool] = {}  # whether the clients of an architecture may have features

    def __reduce__(self) -> tuple[type[FeatureCache], tuple[()]]:
        """Pickles without the features, which each process computes for its own clients."""
        return FeatureCache, ()

    def find(
        self, training: LocalTraining, client: Client, constants: dict[str, Any], samples: Tensor
    ) -> Features | None:
        """The features of a client that begins its local training; None if it has none."""
        pays = training.max_epochs * training.rounds > 1
        datamodule, device = training.datamodule, training.device
        if not pays or datamodule.augmentation or datamodule.reader is not None or not training.frozen_in_use:
            return None  # a reader may change a sample at random each time it reads it
        if has_own_train(client.module) or training.algorithm.client_batches:
            return None
        architecture = training.architecture(client.id)
        labelled = datamodule.labelled(samples)
        if not len(labelled):
            return None  # the loss of samples without a label depends on nothing
        is_first = architecture not in self._looks_up
        if is_first:
            self._looks_up[architecture] = not code_in_losses(training)
        if not self._looks_up[architecture]:
            return None
        lent = {name for name, each in client.module.named_parameters() if is_borrowed(each)}
        module = copy_module(client.module, lent)  # a step may change more than tensor values
        tracing = _Tracing(training, training.copies.move(module, device), on_device(constants, device))
        with (
            seeded(0),  # restores the generators, so that the client's training draws the same numbers as without this
            torch.random.fork_rng([device] if device.type == "cuda" else []),
            torch.autocast(device.type, torch.bfloat16, enabled=training.in_half_precision),
        ):
            parts = tracing.find(torch.cat((labelled, samples))[: len(samples)], is_first)
            self._looks_up[architecture] = not (tracing.branches or tracing.are_too_large)
            return None if parts is None else Features(parts, self._rows(tracing, client.id, samples, parts))

    def _rows(self, tracing: _Tracing, client_id: int, samples: Tensor, parts: FrozenParts) -> Tree:
        """The rows of a client; recomputed only if the frozen parts or the samples have changed."""
        if tracing.training.rounds == 1:
            return tracing.rows(samples)
        kept, kept_samples, rows = self._kept.get((client_id, parts), ({}, None, {}))
        tensors = of_parts(tracing.module.state_dict(keep_vars=True), [name for name, _ in tracing.calls])
        state = changed(tensors, tracing.training.initial, kept)
        is_same = kept_samples is not None and torch.equal(kept_samples, samples) and state.keys() == kept.keys()
        if not is_same or any(state[name] is not kept[name] for name in kept):
            rows = tracing.rows(samples)
            self._kept[client_id, parts] = state, samples, rows
        return rows


class NoTrainer:
    """Stands in for a module's Trainer in a trial and records what is read or set: a client's own may differ."""

    asked: list[str]

    def __init__(self, *modules: LightningModule) -> None:
        vars(self)["asked"] = []  # `__setattr__` would refuse it
        for module in modules:
            module.trainer = self  # pyright: ignore[reportAttributeAccessIssue]

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):  # Python itself reads such names, for example to copy
            self.asked.append(name)
        raise AttributeError(name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.asked.append(name)
        raise AttributeError(name)


def states_of_generators(device: torch.device) -> tuple[Any, ...]:
    """The states of the global generators of Python, NumPy and PyTorch, in a form that can be compared."""
    on_device = bytes(torch.cuda.get_rng_state(device).numpy()) if device.type == "cuda" else b""
    of_numpy: Any = np.random.get_state()
    return random.getstate(), of_numpy[1].tobytes(), of_numpy[2:], torch.get_rng_state().numpy().tobytes(), on_device


class _Tracing:
    """A copy of a client's module that finds its frozen parts by computing the loss of some samples, as steps do.

    Attributes:
        calls: each call, in order, of a frozen part that reads nothing but samples and outputs of such parts: its name
            and its arguments, 0 for the samples and 1, 2, ... for the outputs of earlier calls.
        names: the parts that are called exactly once, so that their outputs can be looked up.
        branches: whether layers of a user's may not compute all batches in the same way, or change parameters; the same
            for all clients.
        are_too_large: whether these outputs have many more bytes than the samples; the same for all clients.
    """

    def __init__(self, training: LocalTraining, module: LightningModule, constants: dict[str, Any]) -> None:
        self.training, self.module, self.constants = training, module, constants
        self.calls: list[tuple[str, list[int]]] = []
        self.names: tuple[str, ...] = ()
        self.branches = self.are_too_large = False

    @in_full_precision()
    def find(self, samples: Tensor, is_first: bool) -> FrozenParts | None:
        """Finds the frozen parts whose outputs depend only on the sample, whichever parameters an epoch trains."""
        (x, y), found = self._batch(samples[:_TRACED_SAMPLES]), set[FrozenParts | None]()
        trainer = NoTrainer(self.module)
        for round, epoch in self.training.trainable.values():
            freezing = Freezing(self.training, self.module, round)
            freezing.freeze(epoch)
            if is_first and branches(self.module):
                self.branches = True
                return None
            try:
                found.add(self._find(x, y, is_first))
            except Exception:  # of the user's code
                return None
            freezing.unfreeze()
            freezing.reset()
        return found.pop() if len(found) == 1 and not trainer.asked else None

    def _find(self, x: Tensor, y: Tensor, is_first: bool) -> FrozenParts | None:
        """Finds the frozen parts for the parameters that are trainable now."""
        saved = of_parts(self.module.state_dict(keep_vars=True), self.training.frozen_in_use)
        # parameters, which may be large, only for one client
        frozen = {name: each for name, each in saved.items() if is_first or not isinstance(each, nn.Parameter)}
        before = {name: (tensor.detach().clone(), version_of(tensor)) for name, tensor in frozen.items()}
        # each step gets a new copy of the samples, because it may change them in place
        self._find_calls(x.clone(), y)
        if not (names := self.names) or self.are_too_large:
            return None
        for name, tensor in of_parts(frozen, names).items():
            if version_of(tensor) != before[name][1] or not same_bits(before[name][0], tensor):
                self.branches |= isinstance(tensor, nn.Parameter)
                return None  # a step changes it, which a part that is looked up would not do
        expected, state = self._loss_and_gradients(x.clone(), y)
        # one sample at a time: an output that depends on other samples of the batch cannot be looked up
        of_each = [self._of_parts(one) for one in x.clone().split(1)]
        with looked_up(self.module, names, {name: torch.cat([rows[name] for rows in of_each]) for name in names}):
            for reads_input in (False, True):
                try:
                    actual, new_state = self._loss_and_gradients(x.clone() if reads_input else no_input(x, y.shape), y)
                except Exception:  # another part needs the samples and got an empty tensor
                    continue
                if state == new_state and len(actual) == len(expected) and all(map(is_close, actual, expected)):
                    return FrozenParts(names, reads_input)
        return None

    def rows(self, samples: Tensor) -> Tree:
        """Outputs of the frozen parts for some samples, in the order of the samples."""
        of_batches = [self._of_parts(self._batch(some)[0]) for some in samples.split(_BATCH_SIZE)]
        return {name: torch.cat([rows[name] for rows in of_batches]) for name in self.names}

    @torch.no_grad()
    def _of_parts(self, x: Tensor) -> Tree:
        known = [x]
        for name, arguments in self.calls:
            part = self.module.get_submodule(name).eval()  # the mode of frozen parts in steps
            known.append(part(*(known[index] for index in arguments)))
        return {name: output for (name, _), output in zip(self.calls, known[1:], strict=True) if name in self.names}

    def _batch(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        device = self.training.device
        (batch,) = self.training.datamodule.batches(samples, batch_size=len(samples), device=device)
        return batch

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.training.algorithm.client_loss(self.module, (x, y), self.constants)

    def _loss_and_gradients(self, x: Tensor, y: Tensor) -> tuple[list[Tensor], tuple[Any, ...]]:
        """A batch's loss, its gradients by the trained parameters that it depends on, and the generators afterwards."""
        seed_all(0)
        loss = self._loss(x, y)
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        results = [loss.detach(), *(gradient for gradient in gradients if gradient is not None)]
        return results, states_of_generators(x.device)

    def _find_calls(self, x: Tensor, y: Tensor) -> None:
        """Finds ``calls`` and ``names``, and whether their outputs are too large."""
        known, inside, start = [(x, version_of(x))], list[str](), states_of_generators(x.device)
        self.calls = calls = []

        def place(argument: Any) -> int | None:
            """The number of a tensor that is known, unless it was changed in place since."""
            found = (index for index, (tensor, _) in enumerate(known) if argument is tensor)
            return next((index for index in found if version_of(argument) == known[index][1]), None)

        def before(name: str, part: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            is_known = arguments and not options and None not in map(place, arguments)
            # if random numbers were drawn before the call, they may make the part read something else in another step
            if not inside and is_known and states_of_generators(x.device) == start:
                inside.append(name)

        def after(name: str, part: nn.Module, arguments: tuple[Any, ...], output: Any) -> None:
            if inside == [name]:
                inside.clear()
                places = [index for argument in arguments if (index := place(argument)) is not None]
                if isinstance(output, Tensor) and len(output) == len(x) and len(places) == len(arguments):
                    calls.append((name, places))
                    known.append((output, version_of(output)))

        frozen = {name: self.module.get_submodule(name) for name in self.training.frozen_in_use}
        # a base whose layers have adapters computes more; checked before this method adds hooks of its own
        parts = {name: part for name, part in frozen.items() if not computes_more(part)}
        with ExitStack() as hooks:
            for name, part in parts.items():
                hooks.enter_context(part.register_forward_pre_hook(partial(before, name), with_kwargs=True))
                hooks.enter_context(part.register_forward_hook(partial(after, name)))
            self._loss(x, y)
        called = [name for name, _ in calls]
        self.names = tuple(name for name in called if called.count(name) == 1)
        of_names = (output.nbytes for name, (output, _) in zip(called, known[1:], strict=True) if name in self.names)
        self.are_too_large |= sum(of_names) > _MOST_TIMES_SAMPLES * x.nbytes


@contextmanager
def looked_up(module: nn.Module, names: Sequence[str], lookup: Tree) -> Iterator[None]:
    """In this context, each named submodule ignores its input and returns the tensor under its name in ``lookup``."""
    with ExitStack() as replaced:
        for name in names:
            look_up = lambda *inputs, name=name: lookup[name]  # noqa: E731
            replaced.enter_context(replaced_forward(module.get_submodule(name), look_up))
        yield


def no_input(x: Tensor, shape: Sequence[int]) -> Tensor:
    """An empty tensor in place of samples that no part reads, with their data type and shape (*shape, 0)."""
    return x.new_empty(*shape, 0)


class LookedUpBatches:
    """A client's batches; puts the frozen parts' outputs for the current batch into ``lookup``."""

    def __init__(self, batches: SampleBatches, features: Features, lookup: Tree) -> None:
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
