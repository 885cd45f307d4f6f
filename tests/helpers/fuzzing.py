"""Malformed configurations: a shipped one with all its defaults, in which one value or one name is wrong."""

import copy
import math
import random
from collections.abc import Iterator
from typing import Any, NamedTuple

Path = tuple[str | int, ...]


class Malformed(NamedTuple):
    """A configuration with one fault: what was done, the key that must be named, and whether it must be refused."""

    what: str
    config: dict[str, Any]
    key: str
    is_nonsense: bool


def places(node: Any, path: Path = ()) -> Iterator[Path]:
    """The way to everything in a configuration."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for name, value in items:
        yield (*path, name)
        yield from places(value, (*path, name))


def key_of(config: dict[str, Any], path: Path) -> str:
    """The key of a place in messages, in which phases have their names and lists inside of classes no index."""
    key, node = "", config
    for depth, step in enumerate(path):
        if key == "federation.phases":  # of a phase that is none, the name is unknown
            key += f".{node[step]['name']}" if depth < len(path) - 1 else ""
        elif isinstance(step, str) and step != "class_path":
            key += f".{step}" if key else step
        node = node[step]
    return key.removesuffix(".init_args")


def malformed(config: dict[str, Any], path: Path, rng: random.Random) -> Malformed | None:
    """The configuration with another value at a place; None where nothing can be wrong."""
    value, name = at(config, path), path[-1]
    faults: list[tuple[Any, bool]] = [(None, False)]
    if isinstance(value, bool) or value is None:
        faults += [(["x"], value is not None), ({"a": {"b": [1]}}, value is not None), ("nonsense", value is not None)]
    elif isinstance(value, (int, float)):
        faults += [(math.nan, True), ("nonsense", True), ([[1], "x"], True), ({"a": {"b": [1]}}, True)]
        faults += [(math.inf, False), (-math.inf, False), (-3, False), (0, False), (1.5, False)]
        faults += [(10**9, False), (10**18, False), (1e300, False)]
    elif name == "class_path":
        takes_modules = any(word in str(value) for word in (".models.", "torch.nn"))
        faults = [("torch.nn.Flatten", not takes_modules), ("os.path", True), (3, True), ("os.getcwd", True)]
        faults += [(f"{value}x", True), ("", True)]
    elif isinstance(value, str):
        faults += [("a/../\0b", False), ("", False), ({"a": {"b": [1]}}, False), (7.25, False)]
    elif isinstance(value, list):
        faults += [("nonsense", True), (7.25, True), ([*value, 7.25], False)]
    else:
        faults += [("nonsense", False), (7.25, False), ([1], False)]
    other, is_nonsense = rng.choice(faults)
    changed = copy.deepcopy(config)
    at(changed, path[:-1])[name] = other
    return Malformed(f"{other!r} in place of {value!r}", changed, key_of(config, path), is_nonsense)


def misspelt(config: dict[str, Any], path: Path, rng: random.Random) -> Malformed | None:
    """The configuration with a misspelt key; None for an item of a list, and for an empty section."""
    name, changed = path[-1], copy.deepcopy(config)
    node = at(changed, path[:-1])
    if not isinstance(name, str) or node[name] in ({}, None, []):
        return None
    index = rng.randrange(len(name))
    wrong = name[:index] + name[index] * 2 + name[index + 1 :]
    node[wrong] = node.pop(name)
    return Malformed(f"a misspelt key, {wrong}", changed, key_of(config, path) if name == "class_path" else wrong, True)


def at(node: Any, path: Path) -> Any:
    """What stands at a place."""
    for step in path:
        node = node[step]
    return node
