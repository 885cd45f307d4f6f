"""What a module was made with, in the words of a configuration, from which ``load_from_checkpoint`` makes it again."""

from __future__ import annotations

import inspect
import warnings
from argparse import ArgumentError
from collections import OrderedDict
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from pathlib import PurePath
from pydoc import locate
from typing import Any

import torch
from lightning.pytorch.cli import instantiate_module
from lightning.pytorch.core.mixins.hparams_mixin import HyperparametersMixin
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin

from fedmoe_pl.checks import InvalidArgumentError, Shown, with_article
from fedmoe_pl.data.map_style import tensors_of
from fedmoe_pl.models.gates import FixedGate
from fedmoe_pl.seeds import seeded

_CONFIGURED = "_configured"  # attribute of a module with the node of the configuration that it was made from
_NUMBERS = (type(None), bool, int, float, str)
_PLAIN = (*_NUMBERS, Tensor)
_COMPARED = (*_NUMBERS, Enum, PurePath, torch.dtype, torch.device)
_NOT_KEPT = ("device", "dtype", "size_average", "reduce", "min_value", "max_value")  # by torch's modules
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)  # nor what Identity takes and ignores
_MISSING = Shown("missing")  # in place of a value


class UndescribedError(Exception):
    """A value cannot be described."""


def keep_configuration(module: nn.Module, node: Mapping[str, Any]) -> None:
    """Keeps with a module the node of the configuration that it was made from."""
    vars(module)[_CONFIGURED] = node


def configured_arguments(module: nn.Module) -> dict[str, Any]:
    """The arguments in the configuration that a module was made from; empty if there was none."""
    node = vars(module).get(_CONFIGURED, {})
    return {**node.get("init_args", {}), **node.get("dict_kwargs", {})}


def hyperparameters_of(module: nn.Module, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters as those of a module that LightningCLI made."""
    instantiator = "lightning.pytorch.cli.instantiate_module"
    return {"_class_path": _class_path(type(module)), "_instantiator": instantiator, **arguments}


def describe(value: Any, configured: Any = None) -> Any:
    """A description of a value, as a configuration would have it, from which the value can be made again.

    Modules of this package and of torch keep their arguments as attributes; others may have saved hyperparameters, or
    have no arguments. Of a module that does neither, and of whatever a function of the configuration has made, such as
    ``torchvision.models.resnet18``, the description is the one in the configuration, if there is one. That of a
    function is its import path.

    Raises:
        UndescribedError: if there is none, or what it makes differs from the module: a part may have been replaced.

    Example:
        >>> describe(nn.ReLU())
        {'class_path': 'torch.nn.modules.activation.ReLU', 'init_args': {'inplace': False}}
    """
    if isinstance(value, (list, tuple, nn.ModuleList)):
        others = configured if isinstance(configured, list) else [None] * len(value)
        return [describe(part, other) for part, other in zip(value, others, strict=True)]
    described = _described(value, configured)
    if isinstance(value, nn.Module) and described is not configured and _CONFIGURED not in vars(value):
        _check_made_again(value, described)
    return described


def _described(value: Any, configured: Any = None) -> Any:
    if type(value) in _PLAIN:
        return value
    if isinstance(value, (list, tuple, nn.ModuleList)):
        return [_described(part) for part in value]
    if isinstance(value, dict):
        return {name: _described(part) for name, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: _described(getattr(value, each.name)) for each in fields(value)}
    if inspect.isfunction(value) and value.__name__.isidentifier() and "<locals>" not in value.__qualname__:
        return _class_path(value)
    if not isinstance(value, nn.Module):
        raise UndescribedError
    if _CONFIGURED in vars(value):
        return vars(value)[_CONFIGURED]
    if isinstance(configured, dict) and not isinstance(locate(configured["class_path"]), type):
        return configured  # the function may have changed what it made, which the class does not tell
    if type(value) is nn.Sequential:
        return _node(sequential, {"modules": {name: _described(part) for name, part in value._modules.items()}})
    try:
        return _node(type(value), _arguments(value))
    except UndescribedError:
        if isinstance(configured, dict) and configured["class_path"].rpartition(".")[2] == type(value).__name__:
            return configured
        raise


def _check_made_again(module: nn.Module, node: dict[str, Any]) -> None:
    """Refuses a module that differs from the one that ``load_from_checkpoint`` makes, here without its numbers."""
    arguments = deepcopy({**node.get("init_args", {}), **node.get("dict_kwargs", {})})  # parsing changes them
    try:
        with torch.device("meta"), seeded(0), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = instantiate_module(nn.Module, {"_class_path": node["class_path"], **arguments})
    except ArgumentError as error:
        raise UndescribedError from error
    except Exception:  # of a constructor that needs numbers
        return
    if isinstance(getattr(module, "classifier", None), nn.Identity):  # in place of one that a mixture does not use
        made.classifier = nn.Identity()
    if isinstance(module, FixedGate) and isinstance(made, FixedGate):
        made.fit_to(len(module.weights))  # as the mixture did
    is_sized_later = any(isinstance(part, LazyModuleMixin) for part in made.modules()) or not _tensors(made)
    if not (is_sized_later and _tensors(module)) and differ(module, made):
        raise UndescribedError


def differ(one: nn.Module, other: nn.Module) -> bool:
    """Whether two modules differ in their tensors' names, parts, hooks, or attributes, see :func:`_comparable`."""
    parts, others = (dict(each.named_modules(remove_duplicate=False)) for each in (one, other))
    if _tensors(one) != _tensors(other) or parts.keys() != others.keys():
        return True
    return any(_part_differs(part, others[name]) for name, part in parts.items())


def _tensors(module: nn.Module) -> list[str]:
    """The names of a module's tensors, without other names that one has."""
    return [name for name, _ in [*module.named_parameters(), *module.named_buffers()]]


def _part_differs(one: nn.Module, other: nn.Module) -> bool:
    if _class_path(type(one)) != _class_path(type(other)) or _hooks(one) != _hooks(other):
        return True
    names = [name for name in vars(one).keys() & vars(other).keys() if name != "training" and name[0] != "_"]
    pairs = [(vars(one)[name], vars(other)[name]) for name in names]
    # a step may have left a tensor where there was None
    return any(not tensors_of(pair) and _comparable(pair[0]) != _comparable(pair[1]) for pair in pairs)


def _hooks(module: nn.Module) -> int:
    """How many hooks may change what a module computes, without those of this package."""
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    return len([hook for hook in hooks if not getattr(hook, "__module__", "").startswith("fedmoe_pl.")])


def _comparable(value: Any) -> Any:
    """What attributes are compared by: plain values as they are, functions by their code, other objects by class."""
    if isinstance(value, _COMPARED):
        return value
    if isinstance(value, (list, tuple)):
        return [_comparable(part) for part in value]
    if isinstance(value, Mapping):
        return {name: _comparable(part) for name, part in value.items()}
    if isinstance(value, partial):
        return [_comparable(part) for part in (value.func, value.args, value.keywords)]
    if inspect.isroutine(value):  # a constructor may make another one, of the same code, for each module
        return value.__name__, getattr(value, "__code__", value)
    return _class_path(value if isinstance(value, type) else type(value))


def stand_in(owner: str, argument: str, value: nn.Module) -> Any:
    """A description of an argument that has none, with which making the owner is refused."""
    kind = "list of modules" if isinstance(value, nn.ModuleList) else type(value).__name__
    node = _node(refuse, {"owner": owner, "argument": argument, "kind": kind})
    return [node] if isinstance(value, nn.ModuleList) else node


def refuse(owner: str, argument: str, kind: str) -> nn.Module:
    """Refuses to make an argument that a checkpoint cannot describe, in place of which one must be given."""
    raise not_described(owner, argument, kind)


def not_described(owner: object, argument: str, kind: str, value: Any = _MISSING) -> InvalidArgumentError:
    """The refusal of a value in place of one, of a class of that name, that a checkpoint cannot describe."""
    reason = f"the checkpoint cannot describe it; pass it to load_from_checkpoint(path, {argument}=...)"
    return InvalidArgumentError(owner, argument, value, with_article(kind), reason)


def sequential(modules: dict[str, nn.Module]) -> nn.Sequential:
    """A ``Sequential``, whose own constructor has no argument that could be named."""
    return nn.Sequential(OrderedDict(modules))


def _arguments(module: nn.Module) -> dict[str, Any]:
    """Descriptions of the arguments of a module's constructor."""
    own, is_of_torch = type(module), type(module).__module__.startswith("torch.nn.")
    if "<locals>" in own.__qualname__:  # it cannot be imported
        raise UndescribedError
    parameters = {} if own.__init__ is nn.Module.__init__ else dict(inspect.signature(own).parameters)
    if isinstance(module, HyperparametersMixin):
        values = {name: value for name, value in module.hparams.items() if not name.startswith("_")}  # not Lightning's
        parameters = {name: each for name, each in parameters.items() if each.kind is not each.VAR_KEYWORD}
    elif is_of_torch:
        others = {name for name, each in parameters.items() if each.kind in _VARIADIC}
        names = [name for name in parameters if name not in {*_NOT_KEPT, *others} and not name.startswith("_")]
        parameters = {name: parameters[name] for name in names}
        values = {name: getattr(module, name) for name in names if hasattr(module, name)}
        if "bias" in values:  # a tensor, None, or whether there is one
            values["bias"] = values["bias"] is not None and values["bias"] is not False
    elif own.__module__.startswith("fedmoe_pl."):
        values = {name: getattr(module, name) for name in parameters}
    else:
        values = {}
    if not parameters.keys() <= values.keys():
        raise UndescribedError
    return {name: _described(value) for name, value in values.items()}


def _class_path(target: Any) -> str:
    return f"{target.__module__}.{target.__qualname__}"


def _node(target: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A description in which arguments among the ``**kwargs`` may be unknown to the parser."""
    parameters = inspect.signature(target).parameters
    node: dict[str, Any] = {"class_path": _class_path(target)}
    for key, is_named in (("init_args", True), ("dict_kwargs", False)):
        if chosen := {name: value for name, value in arguments.items() if (name in parameters) is is_named}:
            node[key] = chosen
    return node
