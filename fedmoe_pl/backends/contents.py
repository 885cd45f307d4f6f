"""What a client may change in a module besides the values of its tensors, by training it or by predicting."""

from __future__ import annotations

import pickle
import random
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from operator import is_
from pathlib import PurePath
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from fedmoe_pl.trees import address, is_borrowed

_PLAIN = {bool, int, float, str}
_NEVER_CHANGE = {type(None), *_PLAIN, type, FunctionType, BuiltinFunctionType, ModuleType, weakref.ReferenceType}
_CONTAINERS = {dict, OrderedDict, list, set}
_LEFT_OUT = (torch.jit.ScriptModule, Trainer, type, PurePath)
_UNKNOWN = "something that cannot be compared"
_SET_FOR_EACH_CLIENT = ("training", "configure_optimizers", "_device")  # by PyTorch, the round's rates and moves


class Contents:
    """What a module has to itself now: attributes of its parts, what is in those, and where its tensors are.

    What copies of the module share is not looked at. Neither are the attributes of tensors, iterators, what is in sets,
    and objects that are written in C, but for arrays and generators of random numbers.

    Args:
        module: the module.
        original: the module that it is a copy of.
        saved_buffers: if False, buffers of the state dict are ignored, and others must also keep their values.
        on_cpu: whether the module stays there. If not, the memory and the identity of parameters and buffers are
            ignored, because a move replaces them.
    """

    def __init__(self, module: nn.Module, original: nn.Module, saved_buffers: bool = True, on_cpu: bool = True) -> None:
        self.saved_buffers = saved_buffers
        self.on_cpu = on_cpu
        self._empty = list[Collection[Any]]()
        self._dicts = list[tuple[str, Mapping[Any, Any], dict[Any, Any], Collection[Any], Callable[..., bool]]]()
        self._states = list[tuple[str, Callable[[Any], Any], Any, Any]]()
        self._labels = dict[int, str]()  # of empty containers
        self._seen = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._is_known = True
        todo: list[tuple[Any, Any, str]] = [(module, original, "")]
        try:
            while todo:
                todo += self._look_into(*todo.pop())
        except Exception:  # of a user's own objects
            self._is_known = False

    def change(self) -> str:
        """What has changed, such as "'calls' of CountingExpert"; empty if only values of tensors may have."""
        try:
            return next(self._changes(), "")
        except Exception:  # of a user's own objects
            return _UNKNOWN

    def _changes(self) -> Iterator[str]:
        if not self._is_known:
            yield _UNKNOWN
        if any(self._empty):
            yield from (self._labels[id(each)] for each in self._empty if each)
        for label, now, then, but, same in self._dicts:
            if now.keys() != then.keys() or not all(map(is_, now.values(), then.values())):
                keys = [key for key in {**now, **then} if key not in but]
                changed = (key for key in keys if key not in now or key not in then or not same(now[key], then[key]))
                yield from (f"'{key}' of {label}" if label.isidentifier() else label for key in changed)
        for label, read, value, state in self._states:
            if not _is_same(read(value), state):
                yield label

    def _look_into(self, value: Any, original: Any, label: str) -> Iterator[tuple[Any, Any, str]]:
        """Notes what may change in a value, and returns what it refers to, beside that of the original."""
        kind = type(value)
        if value is original or kind in _NEVER_CHANGE or id(value) in self._seen:
            return
        if kind in _CONTAINERS and not value:
            self._empty.append(value)
            self._labels[id(value)] = label
            return
        self._seen.add(id(value))
        original = original if type(original) is kind else None
        if isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            yield from self._look_into_part(value, original)
        elif isinstance(value, Tensor):
            self._note(label, _place_and_version, value)
        elif isinstance(value, np.ndarray):
            if value.flags.writeable:
                self._note(label, _values, value)
        elif read := next((read for kinds, read in _STATES.items() if isinstance(value, kinds)), None):
            self._note(label, read, value)
        elif isinstance(value, MethodType):
            yield value.__self__, getattr(original, "__self__", None), label
        elif isinstance(value, partial):
            given = (value.func, value.args, value.keywords)
            of_original = (None,) * 3 if original is None else (original.func, original.args, original.keywords)
            yield from ((*pair, label) for pair in zip(given, of_original, strict=True))
        elif not isinstance(value, _LEFT_OUT):
            yield from self._look_into_object(value, original, label)

    def _look_into_object(self, value: Any, original: Any, label: str) -> Iterator[tuple[Any, Any, str]]:
        if isinstance(value, dict):
            self._note_dict(label, value)
            yield from _pairs(value, {} if original is None else original, label)
        elif isinstance(value, (list, tuple, deque)):
            if not isinstance(value, tuple):
                self._note(label, list, value)
            yield from _pairs(dict(enumerate(value)), dict(enumerate(() if original is None else original)), label)
        elif isinstance(value, set):
            self._note(label, set, value)
        if hasattr(value, "__dict__"):
            yield vars(value), None if original is None else vars(original), label
        if _slots_of(value):
            self._note(label, _slots_of, value)
            yield from _pairs(_slots_of(value), {} if original is None else _slots_of(original), label)

    def _look_into_part(self, part: nn.Module, original: nn.Module | None) -> Iterator[tuple[Any, Any, str]]:
        parameters, buffers, label = part._parameters, part._buffers, type(part).__name__
        self._seen |= {id(parameters), id(buffers)}
        saved = () if self.saved_buffers else buffers.keys() - part._non_persistent_buffers_set
        self._note_dict(label, parameters, () if self.on_cpu else [*parameters], is_)
        self._note_dict(label, buffers, saved if self.on_cpu else [*buffers], is_)
        self._note_dict(label, vars(part), _SET_FOR_EACH_CLIENT)
        counted = {n: tensor for n, tensor in buffers.items() if tensor is not None and n not in saved}
        if self.on_cpu:
            for name, tensor in {**{n: each for n, each in parameters.items() if each is not None}, **counted}.items():
                if not is_borrowed(tensor):  # its memory becomes another as soon as a client writes to it
                    self._note(f"'{name}' of {label}", address, tensor)
        for name, tensor in {} if self.saved_buffers else counted.items():
            self._note(f"'{name}' of {label}", _place_and_version, tensor)
        of_original = {} if original is None else vars(original)
        for name, value in vars(part).items():
            yield value, of_original.get(name), f"'{name}' of {label}"

    def _note(self, label: str, read: Callable[[Any], Any], value: Any) -> None:
        self._states.append((label, read, value, read(value)))

    def _note_dict(
        self, label: str, value: dict[Any, Any], but: Collection[Any] = (), same: Callable[..., bool] | None = None
    ) -> None:
        if len(value):
            self._dicts.append((label, value, {**value}, but, same or _is_same))
        else:
            self._empty.append(value)
            self._labels[id(value)] = label


def _pairs(values: Mapping[Any, Any], originals: Mapping[Any, Any], label: str) -> Iterator[tuple[Any, Any, str]]:
    return ((value, originals.get(key), label) for key, value in values.items())


def _is_same(now: Any, then: Any) -> bool:
    """Whether a value is the same one, or equal: numbers and texts, sequences of such, and tensors."""
    if now is then:
        return True
    if type(now) is not type(then):
        return False
    if isinstance(now, (list, tuple)):
        return len(now) == len(then) and all(map(_is_same, now, then))
    if type(now) is Tensor:
        return now.shape == then.shape and torch.equal(now.cpu(), then.cpu())
    return (type(now) in _PLAIN or isinstance(now, (np.generic, bytes, set, dict))) and now == then


def _place_and_version(tensor: Tensor) -> tuple[int, int]:
    return address(tensor), 0 if tensor.is_inference() else tensor._version


def _values(array: np.ndarray) -> Any:
    if array.dtype.hasobject:
        return [*array.flat]
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _slots_of(value: Any) -> dict[str, Any]:
    """The attributes of an object that are in ``__slots__``."""
    slots = (kind.__dict__.get("__slots__", ()) for kind in type(value).__mro__)
    names = [name for each in slots for name in ((each,) if isinstance(each, str) else each)]
    return {name: getattr(value, name) for name in names if not name.startswith("__") and hasattr(value, name)}


_STATES: dict[Any, Callable[[Any], Any]] = {
    bytearray: bytes,
    random.Random: lambda generator: generator.getstate(),
    torch.Generator: lambda generator: bytes(generator.get_state().numpy()),
    np.random.BitGenerator: lambda generator: pickle.dumps(generator.state),
    np.random.RandomState: lambda generator: pickle.dumps(generator.get_state(legacy=False)),
    np.random.Generator: lambda generator: pickle.dumps(generator.bit_generator.state),
}
