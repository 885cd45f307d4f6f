"""Constructs the objects of a configuration: with the right hyperparameters, and remembering what constructors raise.

jsonargparse hides what a constructor raised where a value may have one of several types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from types import SimpleNamespace
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace
from lightning.pytorch.cli import LightningCLI, _InstantiatorFn

from fedmoe_pl.cli.errors import places
from fedmoe_pl.models.description import keep_configuration
from fedmoe_pl.seeds import named_seed, seeded


class Failure(NamedTuple):
    """A constructor that raised an exception: its class, its arguments, and the exception."""

    class_type: type
    arguments: dict[str, Any]
    error: Exception


class Constructor:
    """Constructs the objects of a configuration, and adds what their constructors raise to a list.

    Another function than the class itself may make the object.
    """

    def __init__(self, failures: list[Failure], construct: Callable[..., Any] | None = None) -> None:
        self.failures = failures
        self.construct = construct

    def __call__(self, class_type: type, *args: Any, applied_instantiation_links: dict, **kwargs: Any) -> Any:
        """Constructs an object; the arguments are those of an instantiator of jsonargparse."""
        try:
            if self.construct is None:
                made = class_type(*args, **kwargs)
            else:
                links = {"applied_instantiation_links": applied_instantiation_links}
                made = self.construct(class_type, *args, **links, **kwargs)
        except Exception as error:
            self.failures.append(Failure(class_type, kwargs, error))
            raise
        return made


class ModuleConstructor:
    """Constructs modules with Lightning's record of the arguments that the configuration gives to each of them.

    Lightning's own takes every module for the one under ``model``. Here a phase may have another, which would get the
    hyperparameters of the first.
    """

    def __init__(self, cli: LightningCLI) -> None:
        self.cli = cli  # itself, and not one of its methods: workers get these objects without the command line
        self.made: set[str] = set()

    def __call__(self, class_type: type, *args: Any, applied_instantiation_links: dict, **kwargs: Any) -> Any:
        """Constructs a module; the arguments are those of an instantiator of jsonargparse."""
        self.cli._dump_config()
        nodes = dict(_nodes(self.cli.config_dump, class_type, kwargs))
        if not nodes:
            return class_type(*args, **kwargs)
        # nodes that differ in nested classes only are told apart by their order
        key = next((key for key in nodes if key not in self.made), [*nodes][-1])
        self.made.add(key)
        of_module = SimpleNamespace(config_dump={"model": nodes[key]}, _dump_config=lambda: None)
        instantiate = _InstantiatorFn(cli=of_module, key="model")  # pyright: ignore[reportArgumentType]
        links = applied_instantiation_links if key == "model" else {}
        return instantiate(class_type, *args, applied_instantiation_links=links, **kwargs)


def with_modules(config: Namespace, dump: Mapping[str, Any], seed: int, parser: ArgumentParser) -> Namespace:
    """The configuration with modules in place of the model and of the phases' gates and models.

    The initial parameters of each are drawn from the seed and its own name, so that they do not depend on which other
    phases stand in the file. Each keeps its node of ``dump``, the configuration in plain values.
    """
    made = deepcopy(config)
    phases, nodes = (
        [phase.get("init_args", phase) for phase in federation["phases"]]
        for federation in (made.federation, dump["federation"])
    )
    places = [
        (phase, node, part, (phase.name, part))
        for phase, node in zip(phases, nodes, strict=True)
        for part in ("gate", "model")
    ]
    for owner, node, part, names in [(made, dump, "model", ("model",)), *places]:
        if isinstance(owner.get(part), Namespace):
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
    name, error = failure.class_type.__name__, failure.error
    same = [key for key, _ in _nodes(configuration, failure.class_type, failure.arguments)]
    key = [*same, *(key for key, _ in _nodes(configuration, failure.class_type, None)), ""][0]
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{f'{key}: ' if key else ''}{name} cannot be made: {reason}"


def _nodes(
    configuration: Mapping[str, Any], class_type: type, arguments: dict[str, Any] | None
) -> list[tuple[str, Mapping[str, Any]]]:
    """The parts of the configuration that name the class, with their keys; None for any arguments."""
    return [
        (key, node)
        for key, node, *_ in places(configuration)
        if isinstance(node, Mapping)
        and str(node.get("class_path")).rpartition(".")[2] == class_type.__name__
        and (arguments is None or _has_arguments(node.get("init_args") or {}, arguments))
    ]


def _has_arguments(init_args: Mapping[str, Any], arguments: dict[str, Any]) -> bool:
    """Whether the numbers and texts in the configuration are those that the constructor got."""
    plain = {name: value for name, value in init_args.items() if isinstance(value, (int, float, str))}
    return all(arguments.get(name) == value for name, value in plain.items())
