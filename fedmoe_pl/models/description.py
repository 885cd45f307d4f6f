"""Descriptions of modules in checkpoints, from which ``load_from_checkpoint`` builds them again."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from fedmoe_pl.models.gates.gate import Gate

# arguments that torch's modules do not keep; the last two of its losses become `reduction`
_OF_TORCH = ("device", "dtype", "size_average", "reduce")


class UndescribedError(Exception):
    """A value cannot be described."""


def describe(value: Any) -> Any:
    """A description of a value in words, numbers, lists and dicts.

    A plain value describes itself. A module is described by its class and its arguments, if it can be imported and
    keeps its arguments as attributes of the same names, as torch's own do; a ``Sequential`` by its modules.

    Raises:
        UndescribedError: if there is none.

    Example:
        >>> describe(nn.ReLU())
        {'class_path': 'torch.nn.modules.activation.ReLU', 'init_args': {'inplace': False}}
    """
    if value is None or isinstance(value, (int, float, str, bool)):
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

    In place of a module that has none, there is one whose construction says what must be given, unless the argument has
    a default and is of the class of one that must be given: the copy of an expert. Other values are left out.

    Args:
        owner: the module whose arguments they are.
        values: the arguments.
    """
    described, others = dict[str, Any](), dict[str, nn.Module]()
    for name, value in values.items():
        try:
            described[name] = describe(value)
        except UndescribedError:
            if isinstance(value, nn.Module):
                others[name] = value
    required = {*required_arguments(type(owner))}
    given = {type(value) for name, value in others.items() if name in required}
    for name, value in others.items():
        if name in required or type(value) not in given:
            words = {"owner": type(owner).__name__, "argument": name, "name": type(value).__name__}
            described[name] = _node(_Undescribed, **words)
    return described


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
    """A module that a checkpoint cannot describe; it cannot be made. It is a gate so that it fits where one belongs.

    Args:
        owner: class of the module whose argument it is.
        argument: the argument.
        name: its class.

    Raises:
        MisconfigurationException: always.
    """

    def __init__(self, owner: str, argument: str, name: str) -> None:
        raise MisconfigurationException(
            f"{owner}: {argument} is missing, because the checkpoint cannot describe {name}; load it with "
            f"{owner}.load_from_checkpoint(path, {argument}=...)."
        )

    def forward(self, x: Tensor) -> Tensor:
        """Never called."""
        raise NotImplementedError


def _arguments(module: nn.Module) -> dict[str, Any]:
    """The arguments of a module's constructor, from its attributes."""
    is_of_torch = type(module).__module__.startswith("torch.nn.")
    arguments = {}
    for name in inspect.signature(type(module)).parameters:
        if is_of_torch and (name in _OF_TORCH or name.startswith("_")):
            continue
        if not hasattr(module, name):
            raise UndescribedError
        value = getattr(module, name)
        arguments[name] = value is not None if is_of_torch and name == "bias" else value
    return arguments


def _node(target: Any, **arguments: Any) -> dict[str, Any]:
    node = {"class_path": f"{target.__module__}.{target.__qualname__}"}
    return {**node, "init_args": arguments} if arguments else node
