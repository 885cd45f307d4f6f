"""Reads the configuration as it was written, before it is parsed: the files, and the arguments that follow them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from jsonargparse import get_loader
from lightning.fabric.utilities.exceptions import MisconfigurationException
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

_CONFIG = ("--config", "-c")
_SUFFIXES = (".yaml", ".yml", ".json")


def read_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """The configuration that a command line gives: its files and its other arguments, each over those before it.

    Args:
        arguments: the arguments of the command line, such as ``["fit", "--config", "a.yaml", "--trainer.devices=2"]``.

    Raises:
        MisconfigurationException: if a file cannot be read; see :func:`read_file`.
    """
    configuration: dict[str, Any] = {}
    for option, value in _options(arguments):
        if option in _CONFIG:
            configuration = merged(configuration, _of_config(value))
        elif option.startswith("--") and not option.endswith(".help"):
            put(configuration, option[2:].split("."), scalar(value))
    return configuration


def read_files(arguments: Sequence[str]) -> list[Mapping[str, Any]]:
    """The content of each file of a command line, without the others; see :func:`read_arguments`."""
    return [_of_config(value) for option, value in _options(arguments) if option in _CONFIG]


def _of_config(value: str) -> Mapping[str, Any]:
    """What ``--config`` gives: the content of a file, or what is written in place of one."""
    text = scalar(value) if "{" in value else None
    content = text if isinstance(text, Mapping) else read_file(os.path.expanduser(value))
    if not isinstance(content, Mapping):
        raise _no_keys(value, "config")
    return content


def put(node: dict[str, Any], names: Sequence[str], value: Any) -> None:
    """Puts an argument of the command line into a configuration, which is changed.

    Args:
        node: the configuration, or the part of it that the names are about.
        names: the argument's name; ``init_args`` may be left out, a "+" at the end appends to a list, and names below a
            list are about its last item.
        value: its value.
    """
    if "class_path" in node and names[0] not in ("class_path", "init_args", "dict_kwargs"):
        names = ["init_args", *names]
    name, below = names[0], names[1:]
    if below:
        child = node.get(name)
        earlier = child[:-1] if isinstance(child, list) else []
        child = child[-1] if isinstance(child, list) and child else child
        child = read_file(str(child)) if names_file(child) else child
        child = {"class_path": child} if isinstance(child, str) else dict(child) if isinstance(child, Mapping) else {}
        put(child, below, value)
        node[name] = [*earlier, child] if isinstance(node.get(name), list) else child
    elif name.endswith("+"):
        before = node.get(name[:-1])
        before = read_file(str(before)) if names_file(before) else before
        items = value if isinstance(value, list) else [value]
        node[name[:-1]] = [*before, *items] if isinstance(before, list) else items
    else:
        node.update(merged(node, {name: value}))


def names_file(value: Any) -> bool:
    """Whether a value of a configuration is the name of another file, which has the value."""
    return isinstance(value, str) and value.endswith(_SUFFIXES) and Path(value).is_file()


def read_file(path: str, key: str = "config") -> dict[str, Any] | list[Any]:
    """Reads a YAML file; names of other files in it become relative to the current folder.

    Args:
        path: the file's.
        key: the argument that names the file, for messages.

    Raises:
        MisconfigurationException: if there is no such file, it is not YAML, holds neither a list nor keys and values,
            has a key twice, or a part of it contains itself. The message has the file and, if there is one, the line.
    """
    problem = f"{key} is '{path}', but"
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if not isinstance(node, MappingNode | SequenceNode):
            raise _no_keys(path, key)
        for line, fault in _faults(node, "", [], set()):
            raise MisconfigurationException(f"{problem} line {line} {fault}.")
        return _with_paths(get_loader("yaml")(text), Path(path).parent, {})
    except OSError as error:
        raise MisconfigurationException(f"{problem} the file cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # a text that is not UTF-8 is a ValueError
        raise MisconfigurationException(f"{problem} {_not_yaml(error)}.") from error


def _no_keys(path: str, key: str) -> MisconfigurationException:
    return MisconfigurationException(
        f"{key} is '{path}', but the file must hold keys and values, such as 'seed_everything: 0'."
    )


def _with_paths(node: Any, folder: Path, seen: dict[int, Any]) -> Any:
    """A file's content in which names of files in its folder have the folder; ``seen`` are parts that are known."""
    if id(node) not in seen:
        result = node
        if isinstance(node, dict):
            result = {name: _with_paths(value, folder, seen) for name, value in node.items()}
        elif isinstance(node, list):
            result = [_with_paths(item, folder, seen) for item in node]
        elif isinstance(node, str) and node.endswith(_SUFFIXES) and (folder / node).is_file():
            result = str(folder / node)
        seen[id(node)] = result
    return seen[id(node)]


class Inherited(dict[str, Any]):
    """Arguments of a class that took the place of another; the parser drops those of the other that do not fit."""


def merged(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with another one over it.

    Example:
        >>> merged({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}})
        {'a': {'b': 3, 'c': 2}}
    """
    result = dict(before)
    for name, value in after.items():
        old = result.get(name)
        if isinstance(value, Mapping) and names_file(old):
            old = read_file(str(old))
        if isinstance(old, Mapping) and "class_path" in old and isinstance(value, str):
            value = {"class_path": value}
        elif isinstance(old, str) and isinstance(value, Mapping) and "init_args" in value and "class_path" not in value:
            old = {"class_path": old}
        result[name] = merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    other_class = "class_path" in before and before["class_path"] != after.get("class_path", before["class_path"])
    if other_class and isinstance(result.get("init_args"), Mapping):
        result["init_args"] = Inherited(result["init_args"])
    return result


def _options(arguments: Sequence[str]) -> list[tuple[str, str]]:
    """The options of a command line with their values, from ``--name=value`` and ``--name value``."""
    options, waiting = [], None
    for argument in arguments:
        if waiting is not None and not argument.startswith("--"):
            options.append((waiting, argument))
            waiting = None
        elif argument.startswith("-"):
            waiting = None
            option, equals, value = argument.partition("=")
            if equals:
                options.append((option, value))
            elif option not in ("--help", "-h", "--print_config"):  # these take no value
                waiting = option
    return options


def scalar(text: str) -> Any:
    """The value of a command line's argument, which is YAML; text that is not stays a text."""
    try:
        return get_loader("yaml")(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text


def _faults(node: Node, key: str, above: list[Node], seen: set[int]):
    """Yields the line and the fault of every key that is given twice, and of every part that contains itself."""
    if any(node is other for other in above):
        yield _line(node), f"has a part, '{key}', that contains itself"
        return
    if id(node) in seen:  # an alias of a part that has been walked
        return
    seen.add(id(node))
    if isinstance(node, SequenceNode):
        for index, item in enumerate(node.value):
            yield from _faults(item, f"{key}[{index}]", [*above, node], seen)
    elif isinstance(node, MappingNode):
        lines: dict[str, int] = {}
        for name, value in node.value:
            if not isinstance(name, ScalarNode):
                yield _line(name), "has a key that is not a word"
                continue
            child = f"{key}.{name.value}" if key else name.value
            if name.value in lines:
                yield _line(name), f"has the key '{child}', which line {lines[name.value]} has already"
            lines[name.value] = _line(name)
            yield from _faults(value, child, [*above, node], seen)


def _line(node: Node) -> int:
    return node.start_mark.line + 1


def _not_yaml(error: Exception) -> str:
    """What is wrong with a text that is not YAML, with its line."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        reason = next(iter(str(error).splitlines()), "") or type(error).__name__
        return f"the file is not YAML ({reason})"
    reason = getattr(error, "problem", None) or getattr(error, "context", None) or "unexpected text"
    return f"line {mark.line + 1}, column {mark.column + 1} is not YAML ({reason})"
