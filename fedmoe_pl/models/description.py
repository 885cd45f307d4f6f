"""Descriptions of modules in checkpoints, from which ``load_from_checkpoint`` builds them again."""

from __future__ import annotations

import enum
import functools
import inspect
import json
import sys
import types
from argparse import ArgumentError
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Union, get_args, get_origin, get_type_hints

from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin
from torch import Tensor, nn

from fedmoe_pl.models.gates.gate import Gate

# arguments that torch's modules do not keep; the last two of its losses become `reduction`
_OF_TORCH = ("device", "dtype", "size_average", "reduce")
# those of an LSTM, whose signature does not say them; a GRU refuses one of those that the parser sees
_OF_LSTM = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional", "proj_size")


_CONTAINERS = (list, tuple, dict, nn.ModuleList, nn.ModuleDict)
_REMEMBERED = "_made_from"  # the attribute of a module of a configuration that has descriptions of its arguments


class UndescribedError(Exception):
    """A value cannot be described; the text names the argument, and the module that it belongs to, if it is nested."""


def remember(module: nn.Module, arguments: Mapping[str, Any]) -> None:
    """Keeps descriptions of the arguments with a module that was made from a configuration.

    Modules of this package keep their arguments themselves, some with what is known only later, such as the width of
    lazy layers. A class with arguments among its ``**kwargs`` that cannot be described is not remembered.
    """
    own, described = type(module), dict[str, Any]()
    if own.__module__.split(".")[0] == "fedmoe_pl":
        return
    parameters, hints = inspect.signature(own).parameters, types_of(own)
    for name, value in arguments.items():
        try:
            described |= _describe_argument(own, name, value, parameters.get(name), hints.get(name))
        except UndescribedError:
            if name not in parameters:
                return
    vars(module)[_REMEMBERED] = described


def remembered(module: nn.Module) -> dict[str, Any]:
    """Descriptions of the arguments that a module was made with, if it was made from a configuration."""
    return vars(module).get(_REMEMBERED, {})


def describe(value: Any, hint: Any = None) -> Any:
    """A description of a value in words, numbers, lists and dicts.

    A plain value or tensor describes itself. A module is described by its class and its arguments, if it can be
    imported and was made from a configuration, gave its arguments to ``save_hyperparameters`` or keeps them as
    attributes of the same names, as torch's own do; a ``Sequential`` by its modules. Where the type says so, a class,
    a function or a member of an enumeration is described by its name.

    Example:
        >>> describe(nn.ReLU())
        {'class_path': 'torch.nn.modules.activation.ReLU', 'init_args': {'inplace': False}}
    """
    if may_be_path(value, hint):
        path = _path(value)
        if not is_read(path, hint):
            raise UndescribedError
        return path
    if value is None or (isinstance(value, (int, float, str, bool, Tensor)) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, (list, tuple, nn.ModuleList)):
        return [describe(part) for part in value]
    if isinstance(value, (dict, nn.ModuleDict)) and "class_path" not in value:  # with it, a class would be made of it
        return {name: describe(part) for name, part in value.items()}
    if not isinstance(value, nn.Module):
        raise UndescribedError
    if "<locals>" in type(value).__qualname__:
        raise UndescribedError(f"{type(value).__name__}, which cannot be imported")
    if type(value) is nn.Sequential:
        if [*value._modules] != [str(index) for index in range(len(value))]:
            raise UndescribedError("the names of a Sequential")
        return _node(sequential, modules=[describe(part) for part in value])
    return _call(type(value), _arguments(value))


def describe_all(owner: nn.Module, values: Mapping[str, Any]) -> dict[str, Any]:
    """Descriptions of some arguments of a module.

    In place of a value that has none, unless it is remembered, there is one that cannot be made, so that it must be
    given and the default is not taken instead. Left out are modules with a default and of the class of one that must be
    given, the copies of an expert, and required values that are no modules.
    """
    described, others, reasons = dict[str, Any](), dict[str, Any](), dict[str, str]()
    parameters, hints = inspect.signature(type(owner)).parameters, types_of(type(owner))
    for name, value in values.items():
        try:
            if name in parameters and not fits(value, parameters[name], hints.get(name)):
                raise UndescribedError
            described[name] = describe(value, hints.get(name))
        except UndescribedError as error:
            if name in remembered(owner):
                described[name] = remembered(owner)[name]
            elif not _is_default(value, parameters.get(name)):
                others[name], reasons[name] = value, str(error) or _name(value)
    required = {*required_arguments(type(owner))}
    given = {type(value) for name, value in others.items() if name in required}
    for name, value in others.items():
        if isinstance(value, nn.Module):
            is_lacking = name in required or type(value) not in given
        else:
            is_lacking = name not in required  # Python itself names a required one, but would take another's default
        if is_lacking:
            described[name] = _undescribed(owner, name, reasons[name], is_typed=hints.get(name, Any) is not Any)
    return described


def _undescribed(owner: nn.Module, name: str, reason: str, is_typed: bool) -> dict[str, Any]:
    module = type(owner).__name__
    return _node(
        _Undescribed,
        message=f"{module}: {name} is missing, because the checkpoint cannot describe {reason}; load it with "
        f"{module}.load_from_checkpoint(path, {name}=...).",
        reason=reason,
        is_typed=is_typed,
    )


def _is_default(value: Any, parameter: inspect.Parameter | None) -> bool:
    return parameter is not None and value is parameter.default


def _name(value: Any) -> str:
    return getattr(value, "__name__", type(value).__name__)


def _path(value: Any) -> Any:
    """The import path of a class or function, the class and arguments of a partial one, or a member's name."""
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, partial):  # such as an optimizer; of a configuration, a function of the parser gets the class
        is_of_parser = value.args and str(getattr(value.func, "__module__", "")).startswith("jsonargparse")
        made = value.args[-1] if is_of_parser else value.func
        if inspect.isclass(made) and (is_of_parser or not value.args):
            return {"class_path": _path(made), "init_args": {name: describe(x) for name, x in value.keywords.items()}}
    module, name = getattr(value, "__module__", None), getattr(value, "__name__", None)
    if module is None or name is None or getattr(sys.modules.get(module), name, None) is not value:
        raise UndescribedError
    return f"{module}.{name}"


def unknown_reason(description: Any) -> str | None:
    """What cannot be described, in a description that says so; None for all others."""
    is_unknown = isinstance(description, dict) and description.get("class_path") == _node(_Undescribed)["class_path"]
    return description["init_args"]["reason"] if is_unknown else None


def hyperparameters_of(module: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters from which Lightning builds the module again, by the descriptions of its arguments."""
    return {
        "_class_path": _node(type(module))["class_path"],
        "_instantiator": "lightning.pytorch.cli.instantiate_module",
        **arguments,
    }


def sequential(modules: list[nn.Module]) -> nn.Sequential:
    """A ``Sequential``, whose own constructor has no argument that could be named."""
    return nn.Sequential(*modules)


class MissingArgumentError(BaseException):
    """An argument without a type is missing; after an ``Exception``, the parser would hand on the description."""


class _Undescribed(Gate):
    """A value that a checkpoint cannot describe; it cannot be made. It is a gate so that it fits where one belongs."""

    def __init__(self, message: str, reason: str = "", is_typed: bool = True) -> None:
        raise (MisconfigurationException if is_typed else MissingArgumentError)(message)

    def forward(self, x: Tensor) -> Tensor:
        """Never called."""
        raise NotImplementedError


def _arguments(module: nn.Module) -> dict[str, Any]:
    """Descriptions of the arguments of a module's constructor."""
    own = type(module)
    if own.__init__ is nn.Module.__init__:  # it takes none, although its signature says so
        return {}
    known, saved = remembered(module), _saved(module)
    is_of_torch = own.__module__.startswith("torch.nn.")
    parameters, hints = inspect.signature(own).parameters, types_of(own)
    names = [*(_OF_LSTM if isinstance(module, nn.LSTM) else parameters)]
    if known or saved:  # also those among the **kwargs
        of_all = [name for name, parameter in parameters.items() if parameter.kind is parameter.VAR_KEYWORD]
        names = [name for name in dict.fromkeys([*names, *known, *saved]) if name not in of_all]
    arguments = {}
    for name in names:
        if is_of_torch and (name in _OF_TORCH or name.startswith("_")):
            continue
        if name in known:
            arguments[name] = known[name]
            continue
        value = saved.get(name, getattr(module, name, inspect.Parameter.empty))
        if value is inspect.Parameter.empty:
            star = "**" if name in parameters and parameters[name].kind is inspect.Parameter.VAR_KEYWORD else ""
            raise UndescribedError(f"{star}{name} of {own.__name__}, which keeps no attribute of this name")
        if is_of_torch and name == "bias":  # a tensor, None, or whether there is one
            value = value is not None and value is not False
        arguments |= _describe_argument(own, name, value, parameters.get(name), hints.get(name))
    return arguments


def _saved(module: nn.Module) -> dict[str, Any]:
    """The arguments that a module gave to ``save_hyperparameters``."""
    saved = dict(module.hparams) if isinstance(module, HyperparametersMixin) else {}
    name = getattr(module, "_hparams_name", None)
    return saved if name in (None, "kwargs") else {name: saved}


def _describe_argument(
    own: type, name: str, value: Any, parameter: inspect.Parameter | None, hint: Any
) -> dict[str, Any]:
    """The description of an argument of a module, by its name; empty for a default that has none."""
    try:
        is_of_unknown_type = parameter is None and hint is None and has_modules(value)
        if is_of_unknown_type or (parameter is not None and not fits(value, parameter, hint)):
            raise UndescribedError
        return {name: describe(value, hint)}
    except UndescribedError as error:
        if _is_default(value, parameter):
            return {}
        raise UndescribedError(str(error) or f"{name} of {own.__name__}, which is {_name(value)}") from None


def _call(class_type: type, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The description of a module, in which arguments among the ``**kwargs`` may be unknown to the parser."""
    parameters = inspect.signature(class_type).parameters
    is_named = class_type.__module__.startswith("torch.nn.")
    node = _node(class_type, **{name: value for name, value in arguments.items() if is_named or name in parameters})
    others = {name: value for name, value in arguments.items() if not is_named and name not in parameters}
    return {**node, "dict_kwargs": others} if others else node


def _node(target: Any, **arguments: Any) -> dict[str, Any]:
    node = {"class_path": f"{target.__module__}.{target.__qualname__}"}
    return {**node, "init_args": arguments} if arguments else node


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
