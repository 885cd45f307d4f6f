"""Remembers what a constructor raised, because jsonargparse hides it where a value may have one of several types."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple


class Failure(NamedTuple):
    """A constructor that raised an exception: its class, its arguments, and the exception."""

    class_type: type
    arguments: dict[str, Any]
    error: Exception


class Constructor:
    """Constructs the objects of a configuration, and remembers what their constructors raise.

    Args:
        failures: the list to which every exception is added; it is raised again.
        construct: calls the class; None calls it directly.
    """

    def __init__(self, failures: list[Failure], construct: Callable[..., Any] | None = None) -> None:
        self.failures = failures
        self.construct = construct

    def __call__(self, class_type: type, *args: Any, applied_instantiation_links: dict, **kwargs: Any) -> Any:
        """Constructs an object; the arguments are those of an instantiator of jsonargparse."""
        try:
            if self.construct is None:
                return class_type(*args, **kwargs)
            return self.construct(class_type, *args, applied_instantiation_links=applied_instantiation_links, **kwargs)
        except Exception as error:
            self.failures.append(Failure(class_type, kwargs, error))
            raise


def describe_failure(failure: Failure, configuration: Mapping[str, Any]) -> str:
    """A sentence with the key of the class in the configuration, and what its constructor raised.

    Example:
        >>> failure = Failure(dict, {"n": 1}, KeyError("n"))
        >>> describe_failure(failure, {"data": {"parts": [{"class_path": "builtins.dict", "init_args": {"n": 1}}]}})
        "data.parts[0]: dict cannot be made: KeyError: 'n'"
    """
    name, error = failure.class_type.__name__, failure.error
    nodes = [(key, node) for key, node in _classes(configuration) if node["class_path"].rsplit(".", 1)[-1] == name]
    same = [(key, node) for key, node in nodes if _has_arguments(node.get("init_args") or {}, failure.arguments)]
    key = (same or nodes or [("", None)])[0][0]
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return f"{f'{key}: ' if key else ''}{name} cannot be made: {reason}"


def _classes(node: Any, key: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yields every class in a part of the configuration, with its key."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            yield from _classes(item, f"{key}[{index}]")
    elif isinstance(node, Mapping):
        if isinstance(node.get("class_path"), str):
            yield key, node
        for name, value in node.items():
            yield from _classes(value, f"{key}.{name}" if key else name)


def _has_arguments(init_args: Mapping[str, Any], arguments: dict[str, Any]) -> bool:
    """Whether the numbers and texts in the configuration are those that the constructor got."""
    plain = {name: value for name, value in init_args.items() if isinstance(value, (int, float, str))}
    return all(arguments.get(name) == value for name, value in plain.items())
