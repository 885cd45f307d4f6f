"""Descriptions of modules in checkpoints, from which ``load_from_checkpoint`` builds them again."""

from __future__ import annotations

import enum
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Union, get_args, get_origin, get_type_hints

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from fedmoe_pl.models.gates.gate import Gate

# arguments that torch's modules do not keep; the last two of its losses become `reduction`
_OF_TORCH = ("device", "dtype", "size_average", "reduce")
# those of an LSTM, whose signature does not say them; a GRU refuses one of those that the parser sees
_OF_LSTM = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size")


class UndescribedError(Exception):
    """A value cannot be described."""


def describe(value: Any) -> Any:
    """A description of a value in words, numbers, lists and dicts.

    A plain value or tensor describes itself. A module is described by its class and its arguments, if it can be
    imported and keeps its arguments as attributes of the same names, as torch's own do; a ``Sequential`` by its
    modules.

    Raises:
        UndescribedError: if there is none.

    Example:
        >>> describe(nn.ReLU())
        {'class_path': 'torch.nn.modules.activation.ReLU', 'init_args': {'inplace': False}}
    """
    if value is None or (isinstance(value, (int, float, str, bool, Tensor)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, (list, tuple, nn.ModuleList)):
        return [describe(part) for part in value]
    if not isinstance(value, nn.Module) or "<locals>" in type(value).__qualname__:  # it could not be imported again
        raise UndescribedError
    if type(value) is nn.Sequential:
        if [*value._modules] != [str(index) for index in range(len(value))]:
            raise UndescribedError  # names of its own
        return _node(sequential, modules=[describe(part) for part in value])
    return _node(type(value), **{name: describe(argument) for name, argument in _arguments(value).items()})


def describe_all(owner: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Descriptions of some arguments of a module.

    In place of a value that has none, there is one that cannot be constructed, so that it must be given and the default
    is not taken instead. Left out are modules with a default and of the class of one that must be given, the copies of
    an expert, and required values that are no modules.

    Args:
        owner: the module whose arguments they are.
        values: the arguments.
    """
    described, others = dict[str, Any](), dict[str, Any]()
    parameters, hints = inspect.signature(type(owner)).parameters, _hints(type(owner))
    for name, value in values.items():
        try:
            if name in parameters and not _fits(value, parameters[name], hints.get(name)):
                raise UndescribedError
            described[name] = _path(value) if _may_be_path(value, hints.get(name)) else describe(value)
        except UndescribedError:
            others[name] = value
    required = {*required_arguments(type(owner))}
    given = {type(value) for name, value in others.items() if name in required}
    for name, value in others.items():
        if isinstance(value, nn.Module):
            is_lacking = name in required or type(value) not in given
        else:
            is_lacking = name not in required  # Python itself names a required one, but would take another's default
        if is_lacking:
            described[name] = _undescribed(owner, name, value)
    return described


def _undescribed(owner: nn.Module, name: str, value: Any) -> dict[str, Any]:
    module, described = type(owner).__name__, getattr(value, "__qualname__", type(value).__name__)
    return _node(
        _Undescribed,
        message=f"{module}: {name} is missing, because the checkpoint cannot describe {described}; load it with "
        f"{module}.load_from_checkpoint(path, {name}=...).",
    )


def _hints(class_type: type) -> dict[str, Any]:
    """The types of a constructor's arguments; none if a name in them is unknown."""
    try:
        return get_type_hints(class_type.__init__)
    except Exception:  # names that are imported for type checkers only
        return {}


def _may_be_path(value: Any, hint: Any) -> bool:
    """Whether an argument of this type may be written as an import path or, of an enumeration, as a name."""
    kinds = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if isinstance(value, enum.Enum):
        return type(value) in kinds
    are_called = any(kind in (Callable, type) or get_origin(kind) in (Callable, type) for kind in kinds)
    return are_called and callable(value) and not isinstance(value, nn.Module)


def _path(value: Any) -> Any:
    """The import path of a class or function, the class and arguments of a partial one, or a member's name."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, partial) and not value.args and inspect.isclass(value.func):  # such as an optimizer
        return {"class_path": _path(value.func), "init_args": {name: describe(x) for name, x in value.keywords.items()}}
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if module is None or name is None or getattr(sys.modules.get(module), name, None) is not value:
        raise UndescribedError
    return f"{module}.{name}"


def _fits(value: Any, parameter: inspect.Parameter, hint: Any) -> bool:
    """Whether a module, or a list of modules, can be this argument, and is not only an attribute of the same name."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        return False
    if isinstance(value, (list, tuple, nn.ModuleList)) and any(isinstance(part, nn.Module) for part in value):
        return hint not in (None, Any, list, tuple)  # of these types, descriptions in a list stay as they are
    is_plain = isinstance(parameter.default, (int, float, str)) or hint in (int, float, str, bool)
    return not (is_plain and isinstance(value, nn.Module))


def required_arguments(class_type: type) -> list[str]:
    """The arguments without a default."""
    parameters = inspect.signature(class_type).parameters.values()
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [each.name for each in parameters if each.default is each.empty and each.kind not in kinds]


def is_unknown(description: Any) -> bool:
    """Whether a description is that of a module that has none."""
    return isinstance(description, dict) and description.get("class_path") == _node(_Undescribed)["class_path"]


def hyperparameters_of(module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters from which Lightning builds the module again.

    Args:
        module: the module.
        arguments: the descriptions of its arguments.
    """
    return {
        "_class_path": _node(type(module))["class_path"],
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
        **arguments,
    }


def sequential(modules: list[nn.Module]) -> nn.Sequential:
    """A ``Sequential``, whose own constructor has no argument that could be named."""
    return nn.Sequential(*modules)


class _Undescribed(Gate):
    """A value that a checkpoint cannot describe; it cannot be made. It is a gate so that it fits where one belongs.

    Args:
        message: what is missing, and how to load the checkpoint.

    Raises:
        MisconfigurationException: always, with the message.
    """

    def __init__(self, message: str) -> None:
        raise MisconfigurationException(message)

    def forward(self, x: Tensor) -> Tensor:
        """Never called."""
        raise NotImplementedError


def _arguments(module: nn.Module) -> dict[str, Any]:
    """The arguments of a module's constructor, from its attributes."""
    if type(module).__init__ is nn.Module.__init__:  # it takes none, although its signature says so
        return {}
    is_of_torch = type(module).__module__.startswith("torch.nn.")
    arguments = {}
    parameters, hints = inspect.signature(type(module)).parameters, _hints(type(module))
    for name in _OF_LSTM if isinstance(module, nn.LSTM) else parameters:
        if is_of_torch and (name in _OF_TORCH or name.startswith("_")):
            continue
        value = getattr(module, name, inspect.Parameter.empty)
        is_missing = value is inspect.Parameter.empty
        if is_missing or (name in parameters and not _fits(value, parameters[name], hints.get(name))):
            raise UndescribedError
        is_bias = is_of_torch and name == "bias"  # a tensor, None, or whether there is one
        arguments[name] = value is not None and value is not False if is_bias else value
    return arguments


def _node(target: Any, **arguments: Any) -> dict[str, Any]:
    node = {"class_path": f"{target.__module__}.{target.__qualname__}"}
    return {**node, "init_args": arguments} if arguments else node
