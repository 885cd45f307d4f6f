"""Outputs of the parts that clients' models have in common, on the samples on which all of them are tested."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fedmoe_pl.models.layers import computes_more, replaced_forward
from fedmoe_pl.trees import Tree

_MOST_BYTES = 2**28  # of what is remembered in a process, so that it never weighs much more than the data


class SharedParts:
    """Remembers what the parts of one model gave for each batch, for the next models that have the same parts.

    A part is looked up if its tensors are the same objects, its input is equal, and it draws no random numbers. Its
    output is then the one that it would compute again.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, tuple[weakref.ref[Tensor], int]] = {}  # of the last model
        self._calls: dict[str, list[tuple[Tensor, Tensor]]] = {}  # by part, the input and output for each batch
        self._verified: set[str] = set()
        self._excluded: set[str] = set()  # parts whose output does not depend on their tensors and input alone

    @contextmanager
    def looked_up(self, module: LightningModule, state: Tree) -> Iterator[None]:
        """In this context, the module, with the tensors of ``state``, is called for one batch after another."""
        same = {name for name, tensor in state.items() if self._is_last(name, tensor)}
        self._tensors = {name: (weakref.ref(tensor), _version(tensor)) for name, tensor in state.items()}
        parts = _parts_of(module, same, state.keys() - same) if same else {}
        self._calls = {name: self._calls.get(name, []) for name in parts if name not in self._excluded}
        self._verified &= self._calls.keys()
        self._inside = False
        with ExitStack() as patched:
            for name in self._calls:
                places = itertools.count()
                call = partial(self._call, name, parts[name].forward, places)
                patched.enter_context(replaced_forward(parts[name], call))
            yield

    def _is_last(self, name: str, tensor: Tensor) -> bool:
        last = self._tensors.get(name)
        return last is not None and last[0]() is tensor and last[1] == _version(tensor)

    def _call(self, name: str, forward: Callable[..., Any], places: Iterator[int], *inputs: Any, **options: Any) -> Any:
        """The output of a part, looked up or computed."""
        place, calls = next(places), self._calls.get(name)
        is_simple = len(inputs) == 1 and isinstance(inputs[0], Tensor) and not options
        if self._inside or calls is None or place > len(calls) or not is_simple:
            return forward(*inputs, **options)
        if place < len(calls):
            return self._remembered(name, forward, inputs[0], *calls[place])
        return self._computed(name, forward, inputs[0], calls)

    def _remembered(self, name: str, forward: Callable[..., Any], x: Tensor, known: Tensor, output: Tensor) -> Any:
        if not torch.equal(known, x):
            return forward(x)
        if name not in self._verified:  # it may read what is not its own, such as a tensor of another part
            computed = forward(x)
            if not torch.equal(computed, output):
                self._exclude(name)
                return computed
            self._verified.add(name)
        return output.clone()  # which the next part may change in place

    def _computed(self, name: str, forward: Callable[..., Any], x: Tensor, calls: list[tuple[Tensor, Tensor]]) -> Any:
        before = _random_state(x.device)
        self._inside = True
        try:
            output = forward(x)
        finally:
            self._inside = False
        if not isinstance(output, Tensor) or not torch.equal(before, _random_state(x.device)):
            self._exclude(name)
        elif self._bytes() + x.nbytes + output.nbytes <= _MOST_BYTES:
            calls.append((x, output.clone()))
        return output

    def _exclude(self, name: str) -> None:
        self._excluded.add(name)
        del self._calls[name]

    def _bytes(self) -> int:
        return sum(tensor.nbytes for calls in self._calls.values() for call in calls for tensor in call)


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _parts_of(module: nn.Module, same: Set[str], others: Set[str]) -> dict[str, nn.Module]:
    """Submodules by name that hold tensors with names in ``same`` and none with names in ``others``."""
    with_same, with_others = (
        {name[:end] for name in names for end, letter in enumerate(name) if letter == "."} for names in (same, others)
    )
    names = with_same - with_others
    parts = {name: part for name, part in module.named_modules() if name in names}
    return {
        name: part
        for name, part in parts.items()
        if not isinstance(part, torch.jit.ScriptModule) and not computes_more(part)
    }


def _random_state(device: torch.device) -> Tensor:
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
