"""Constructs the objects of a configuration: with the right hyperparameters, and remembering what constructors raise.

jsonargparse hides what a constructor raised where a value may have one of several types.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple, get_args, get_type_hints

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch import LightningModule
from lightning.pytorch.core.mixins.hparams_mixin import _given_hyperparameters_context

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.cli.errors import places, words_of
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.models.description import keep_configuration
from fedmoe_pl.seeds import named_seed, seeded


class Failure(NamedTuple):
    """A constructor that raised an exception: its class, its arguments, and the exception."""

    class_type: type
    arguments: dict[str, Any]
    error: Exception


class Constructor:
    """Constructs the objects of a configuration, as an instantiator of jsonargparse.

    Attributes:
        node: the part of the configuration whose model or data module is being made. Lightning's own instantiator takes
            every module for the one under ``model``; here a phase may have another.
        failure: the last constructor that has failed.
    """

    def __init__(self) -> None:
        self.node: Mapping[str, Any] = {}
        self.failure: Failure | None = None

    def __call__(self, class_type: type, *args: Any, applied_instantiation_links: dict, **kwargs: Any) -> Any:
        """Constructs an object."""
        try:
            check_values(class_type, kwargs)
            if issubclass(class_type, LightningModule | FederatedDataModule) and _names(self.node, class_type):
                arguments = {**self.node.get("init_args", {}), **self.node.get("dict_kwargs", {})}
                hparams = {"_class_path": self.node["class_path"], **arguments}
                with _given_hyperparameters_context(hparams, "lightning.pytorch.cli.instantiate_module"):
                    return class_type(*args, **kwargs)
            return class_type(*args, **kwargs)
        except Exception as error:
            self.failure = Failure(class_type, kwargs, error)
            raise


def check_values(class_type: type, arguments: Mapping[str, Any]) -> None:
    """Refuses nan, and null where it is no value of an argument; jsonargparse lets both pass."""
    for name, value in arguments.items():
        if isinstance(value, float) and math.isnan(value):
            raise InvalidArgumentError(class_type.__name__, name, value, "a finite number")
        if value is None and name in (hints := _not_optional(class_type)):
            raise InvalidArgumentError(class_type.__name__, name, value, words_of(repr(hints[name])))


@cache
def _not_optional(class_type: type) -> dict[str, Any]:
    """The types of a class's arguments that cannot be None."""
    parameters = inspect.signature(class_type).parameters
    try:
        hints = get_type_hints(class_type.__init__)
    except NameError:  # of a type that is only imported where types are checked
        return {}
    hints = {name: hint for name, hint in hints.items() if name in parameters and parameters[name].default is not None}
    return {name: hint for name, hint in hints.items() if hint is not Any and type(None) not in get_args(hint)}


def with_modules(
    config: Namespace, dump: Mapping[str, Any], seed: int, parser: ArgumentParser, constructor: Constructor
) -> Namespace:
    """The configuration with modules in place of the model and of the phases' gates and models.

    The initial parameters of each are drawn from the seed and its own name, so that they do not depend on which other
    phases stand in the file. Each keeps its node of ``dump``, the configuration in plain values.
    """
    made = deepcopy(config)
    parts = [(made, dump, "model", ("model",))]
    for phase, node in zip(made.federation.phases, dump["federation"]["phases"], strict=True):
        phase, node = phase.get("init_args", phase), node.get("init_args", node)
        parts += [(phase, node, part, (phase.name, part)) for part in ("gate", "model")]
    for owner, node, part, names in parts:
        if isinstance(owner.get(part), Namespace):
            constructor.node = node[part]
            with seeded(named_seed(seed, *names)):
                owner[part] = parser.instantiate(Namespace(part=owner[part])).part
            keep_configuration(owner[part], node[part])
    return made


def describe_failure(failure: Failure, configuration: Mapping[str, Any]) -> str:
    """A sentence with the key of the class in the configuration, and what its constructor raised.

    Example:
        >>> failure = Failure(dict, {"n": 1}, KeyError("n"))
        >>> describe_failure(failure, {"data": {"parts": [{"class_path": "builtins.dict", "init_args": {"n": 1}}]}})
        "data.parts[0]: dict cannot be made: KeyError: 'n'"
    """
    of_class = [place for place in places(configuration) if _names(place.value, failure.class_type)]
    of_class.sort(key=lambda place: not _has_arguments(place.value.get("init_args") or {}, failure.arguments))
    reason = " ".join(f"{type(failure.error).__name__}: {failure.error}".split())
    return f"{f'{of_class[0].key}: ' if of_class else ''}{failure.class_type.__name__} cannot be made: {reason}"


def _names(node: Any, class_type: type) -> bool:
    """Whether a part of a configuration names the class."""
    return isinstance(node, Mapping) and str(node.get("class_path")).rpartition(".")[2] == class_type.__name__


def _has_arguments(init_args: Mapping[str, Any], arguments: dict[str, Any]) -> bool:
    """Whether the numbers and texts in the configuration are those that the constructor got."""
    plain = {name: value for name, value in init_args.items() if isinstance(value, (int, float, str))}
    return all(arguments.get(name) == value for name, value in plain.items())
