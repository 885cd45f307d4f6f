"""The arguments of constructors, and what their types allow."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import types
from argparse import ArgumentError
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser
from torch import nn

_CONTAINERS = (list, tuple, dict, nn.ModuleList, nn.ModuleDict)


def required_arguments(class_type: type) -> list[str]:
    """The arguments without a default."""
    parameters = inspect.signature(class_type).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in kinds]


@functools.lru_cache(maxsize=256)
def types_of(class_type: type) -> Mapping[str, Any]:
    """The types of a constructor's arguments, also of those that it hands on; not those with names that are unknown."""
    hints = dict[str, Any]()
    for base in reversed([base for base in class_type.__mro__ if inspect.isfunction(vars(base).get("__init__"))]):
        own = inspect.signature(base.__init__).parameters
        hints = {name: hint for name, hint in hints.items() if name not in own}
        try:
            hints |= get_type_hints(base.__init__)
        except Exception:  # names that are imported for type checkers only
            continue
    return MappingProxyType(hints)


def may_be_path(value: Any, hint: Any) -> bool:
    """Whether an argument of this type may be written as an import path or, of an enumeration, as a name."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if isinstance(value, enum.Enum):
        return type(value) in kinds
    are_called = any(kind in (Callable, type) or get_origin(kind) in (Callable, type) for kind in kinds)
    return are_called and callable(value) and not isinstance(value, nn.Module)


def is_read(description: Any, hint: Any) -> bool:
    """Whether the parser reads a description as this type; it knows no return type of functions such as torch's."""
    try:
        try:
            _read_text(json.dumps(description), hint)
        except TypeError:  # of a tensor in it, or a type without a hash
            _read(description, hint)
    except ArgumentError:
        return False
    return True


@functools.lru_cache(maxsize=256)  # parsing takes longer than writing a small model; an error is not kept
def _read_text(text: str, hint: Any) -> None:
    _read(json.loads(text), hint)


def _read(description: Any, hint: Any) -> None:
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--value", type=hint)
    parser.parse_object({"value": description})


def fits(value: Any, parameter: inspect.Parameter, hint: Any) -> bool:
    """Whether a module, or a list of modules, can be this argument, and is not only an attribute of the same name."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        return False
    if isinstance(value, _CONTAINERS) and has_modules(value):
        return hint not in (None, Any, list, tuple, dict)  # of these types, descriptions in a list stay as they are
    is_plain = isinstance(parameter.default, (int, float, str)) or hint in (int, float, str, bool)
    return not (is_plain and isinstance(value, nn.Module))


def has_modules(value: Any) -> bool:
    """Whether the value is a module, or one is in it."""
    if not isinstance(value, _CONTAINERS):
        return isinstance(value, nn.Module)
    return any(has_modules(part) for part in (value.values() if isinstance(value, (dict, nn.ModuleDict)) else value))
