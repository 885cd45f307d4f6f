"""Descriptions of constructors' arguments for checkpoints."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from torch.nn.modules.loss import _Loss

_DEPRECATED = ("size_average", "reduce")  # arguments of PyTorch's losses that become `reduction`


def describe(value: Any) -> Any:
    """A description of a value for a checkpoint; None if there is none.

    A plain value describes itself. A module is described by its class path and its arguments, if it keeps them as
    attributes of the same names, a function by its import path.
    """
    if isinstance(value, (int, float, str, bool)):
        return value
    if isinstance(value, (list, tuple, nn.ModuleList)):
        described = [describe(part) for part in value]
        return None if None in described else described
    if inspect.isfunction(value) and value.__name__.isidentifier() and "<locals>" not in value.__qualname__:
        return _import_path(value)
    if not isinstance(value, nn.Module) or "<locals>" in type(value).__qualname__:  # it could not be imported again
        return None
    names = [
        name
        for name in inspect.signature(type(value)).parameters
        if not (isinstance(value, _Loss) and name in _DEPRECATED)
    ]
    arguments = {name: getattr(value, name, None) for name in names}
    described = {name: describe(argument) for name, argument in arguments.items() if argument is not None}
    if None in described.values() or not all(hasattr(value, name) for name in arguments):
        return None
    return {"class_path": _import_path(type(value)), "init_args": described}


def _import_path(value: Any) -> str:
    return f"{value.__module__}.{value.__qualname__}"
