"""What a client may change in a module besides the values of its tensors, by training it or by predicting."""

from __future__ import annotations

import pickle
import random
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Collection
from functools import partial
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Trainer
from torch import Tensor, nn

from fedmoe_pl.trees import address, is_borrowed

_PLAIN = {bool, int, float, str}
_NEVER_CHANGE = {type(None), *_PLAIN, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial}
_OF_OTHERS = (Trainer, type, weakref.ReferenceType)
_CONTAINERS = (dict, OrderedDict, list, set)
_GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
_SET_FOR_EACH_CLIENT = ("training", "configure_optimizers", "_device")


class Contents:
    """What is in a module now: attributes of its parts, what is in those, and where its tensors are.

    Args:
        module: the module.
        saved_buffers: whether the buffers of a state dict count. Without them, other buffers may not change in place.
        on_cpu: whether the module stays there. A move gives it other parameters and buffers, so that none count.
    """

    def __init__(self, module: nn.Module, saved_buffers: bool = True, on_cpu: bool = True) -> None:
        self.saved_buffers = saved_buffers
        self.on_cpu = on_cpu
        self._seen = set[int]()
        self._empty = list[Collection[Any]]()
        self._dicts = list[tuple[dict[Any, Any], dict[Any, Any], Collection[Any]]]()
        self._others = list[tuple[Collection[Any], list[Any]]]()
        self._states = list[tuple[Callable[[Any], Any], Any, Any]]()
        self._look_into(module)

    def have_changed(self) -> bool:
        """Whether, say, a part has counted something, or a buffer is another tensor. Values of tensors may differ."""
        return (
            any(self._empty)
            or not all(_has_same(*items) for items in self._dicts)
            or not all(len(now) == len(then) and all(map(_is_same, now, then)) for now, then in self._others)
            or any(read(value) != state for read, value, state in self._states)
        )

    def _look_into(self, value: Any) -> None:
        """Notes what may change in a value, and in all that it refers to."""
        if (kind := type(value)) in _NEVER_CHANGE:
            return
        if kind in _CONTAINERS and not value:
            self._empty.append(value)
            return
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, nn.Module):
            self._look_into_part(value)
        elif isinstance(value, Tensor):
            self._note(_place_and_version, value)
        elif isinstance(value, np.ndarray):
            self._note(np.ndarray.tobytes, value)
        elif isinstance(value, torch.Generator):
            self._note(_state_of_generator, value)
        elif isinstance(value, _GENERATORS):
            self._note(pickle.dumps, value)
        elif isinstance(value, dict):
            self._note_dict(value)
            for item in value.values():
                self._look_into(item)
        elif isinstance(value, (list, tuple, deque, set, frozenset)):
            if not value:
                self._empty.append(value)
            elif not isinstance(value, (tuple, frozenset)):
                self._others.append((value, [*value]))
            for item in value:
                self._look_into(item)
        elif hasattr(value, "__dict__") and not isinstance(value, _OF_OTHERS):
            self._look_into(vars(value))

    def _look_into_part(self, part: nn.Module) -> None:
        parameters, buffers = part._parameters, part._buffers
        self._seen |= {id(parameters), id(buffers)}
        saved = () if self.saved_buffers else buffers.keys() - part._non_persistent_buffers_set
        self._note_dict(parameters, () if self.on_cpu else [*parameters])
        self._note_dict(buffers, saved if self.on_cpu else [*buffers])
        self._note_dict(vars(part), _SET_FOR_EACH_CLIENT)
        counted = [tensor for name, tensor in buffers.items() if tensor is not None and name not in saved]
        if self.on_cpu:
            for tensor in (*(each for each in parameters.values() if each is not None), *counted):
                if not is_borrowed(tensor):  # its memory becomes another as soon as a client writes to it
                    self._note(address, tensor)
        for tensor in () if self.saved_buffers else counted:
            self._note(_place_and_version, tensor)
        for value in vars(part).values():
            self._look_into(value)

    def _note(self, read: Callable[[Any], Any], value: Any) -> None:
        self._states.append((read, value, read(value)))

    def _note_dict(self, value: dict[Any, Any], but: Collection[Any] = ()) -> None:
        if value:
            self._dicts.append((value, {**value}, but))
        else:
            self._empty.append(value)


def _has_same(now: dict[Any, Any], then: dict[Any, Any], but: Collection[Any]) -> bool:
    """Whether a dict has the same items, but for some keys. Nearly all are the same objects."""
    if now.keys() == then.keys() and all(map(is_, now.values(), then.values())):
        return True
    keys = now.keys() - but
    return keys == then.keys() - but and all(_is_same(now[key], then[key]) for key in keys)


def _is_same(now: Any, then: Any) -> bool:
    return now is then or (type(now) is type(then) and type(now) in _PLAIN and now == then)


def _state_of_generator(generator: torch.Generator) -> bytes:
    return generator.get_state().numpy().tobytes()  # pickled, equal states have different bytes


def _place_and_version(tensor: Tensor) -> tuple[int, int]:
    return address(tensor), 0 if tensor.is_inference() else tensor._version
