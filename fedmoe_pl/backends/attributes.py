"""What a module holds besides the values of its state dict, to see whether a step changes it."""

from __future__ import annotations

import io
import pickle
import weakref
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial, weakref.ReferenceType)


class CannotCompare(Exception):
    """Which attribute cannot be compared, and why."""


class _Pickler(pickle.Pickler):
    """Pickles code as its id, and the known tensors, whose values are compared elsewhere, as their attributes."""

    def __init__(self, file: io.BytesIO, known: set[int]) -> None:
        super().__init__(file)
        self.known = known

    def persistent_id(self, value: Any) -> Any:
        is_code = isinstance(value, _CODE)
        return vars(value) if id(value) in self.known else id(value) if is_code else None


def attributes(module: nn.Module) -> dict[str, bytes]:
    """The attributes of a module's parts, pickled, by path.

    Raises:
        CannotCompare: if an attribute cannot be pickled.
    """
    contents, known = dict[str, bytes](), {id(tensor) for tensor in module.state_dict(keep_vars=True).values()}
    for path, part in module.named_modules():
        for name, value in {**vars(part), "_modules": [*part._modules], "_trainer": None}.items():
            file, label = io.BytesIO(), f"{path}.{name}".lstrip(".")
            try:
                _Pickler(file, known).dump(value)
            except Exception as error:
                raise CannotCompare(f"'{label}', which cannot be compared ({error})") from error
            contents[label] = file.getvalue()
    return contents


def changed_attributes(module: nn.Module, before: dict[str, bytes]) -> list[str]:
    """The names of attributes that are others than before; raises as :func:`attributes` does."""
    after = attributes(module)
    return [name for name in {**before, **after} if before.get(name) != after.get(name)]
