"""Malformed configurations, made from the types of the arguments that the command line knows."""

import copy
import math
import random
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin

from fedmoe_pl import Phase
from fedmoe_pl.cli.schema import Argument, arguments_of_class, find_class, place_in
from fedmoe_pl.cli.words import classes_of, kinds_of

# Nothing refuses a value of these below 0 or an infinite one, because it means something, or nothing uses it.
MEANINGFUL = {"last_epoch", "default_root_dir", "model_registry", "name", "init_args", "ckpt_path", "root"}


class Place(NamedTuple):
    """An argument in a configuration: the way to it, its key in messages, and its type."""

    path: tuple[str | int, ...]
    key: str
    argument: Argument


class Malformed(NamedTuple):
    """A configuration with one fault: what was done, the key that must be named, and whether it must be refused."""

    what: str
    config: dict[str, Any]
    key: str
    is_nonsense: bool


def expanded(node: Any, hint: Any) -> Any:
    """A part of a configuration in which every class has the form with ``class_path`` and ``init_args``."""
    classes = tuple(each for kind in kinds_of(hint) for each in classes_of(kind))
    items = [get_args(kind)[0] for kind in kinds_of(hint) if get_origin(kind) is list]
    if isinstance(node, list) and items:
        return [expanded(item, items[0]) for item in node]
    if isinstance(node, str) and classes and str not in kinds_of(hint):
        found = find_class(node, hint, classes, "")
        return node if isinstance(found, str) else {"class_path": node, "init_args": {}}
    if isinstance(node, dict) and classes:
        inner = node.get("init_args") or {} if "class_path" in node else node
        arguments = arguments_of_class(_class_of(node, hint, classes))
        inner = {name: expanded(value, arguments[name].hint) for name, value in inner.items()}
        return {"class_path": node["class_path"], "init_args": inner} if "class_path" in node else inner
    return node


def _class_of(node: dict[str, Any], hint: Any, classes: tuple[type, ...]) -> Any:
    return find_class(node["class_path"], hint, classes, "") if "class_path" in node else classes[0]


def places(node: Any, argument: Argument, path: tuple[str | int, ...], key: str) -> Iterator[Place]:
    """Every argument below an argument, and itself; also those that the configuration leaves out."""
    yield Place(path, key, argument)
    hint = argument.hint
    classes = tuple(each for kind in kinds_of(hint) for each in classes_of(kind))
    items = [get_args(kind)[0] for kind in kinds_of(hint) if get_origin(kind) is list]
    if isinstance(node, list) and items:
        for index, item in enumerate(node):
            itself, *others = places(item, Argument(items[0], ..., True), (*path, index), place_in(node, index, key))
            yield itself._replace(key=f"{key}[{index}]")  # a phase that is none has no name
            yield from (place._replace(key=f"{key}{place.key}") for place in others)
    elif isinstance(node, dict) and classes:
        class_type = _class_of(node, hint, classes)
        inner, names = (node["init_args"], ("init_args",)) if "class_path" in node else (node, ())
        for name, below in _later(hint, class_type):
            # a phase without a name is only known by its place
            start = f"[{path[-1]}]" if class_type is Phase and name == "name" else key
            child = ".".join((start, *names, name))
            yield from places(inner.get(name), below, (*path, *names, name), child)


def _later(hint: Any, class_type: type) -> list[tuple[str, Argument]]:
    """The arguments of a class but those that are given later, such as an optimizer's parameters."""
    given_later = 1 if any(get_origin(kind) not in (None, list, Literal) for kind in kinds_of(hint)) else 0
    return [*arguments_of_class(class_type).items()][given_later:]


def all_places(config: dict[str, Any], arguments: dict[str, Argument]) -> list[Place]:
    """Every argument of a whole configuration."""
    found = []
    for name, argument in arguments.items():
        section, _, inner = name.partition(".")
        if name in ("config", "print_config", "ckpt_path", "trainer", "federation"):
            continue
        path = (section, inner) if inner else (section,)
        node = config.get(section)
        found += places(node.get(inner) if inner else node, argument, path, name)
    return found


def chosen(found: list[Place], rng: random.Random) -> Place:
    """One of the places; more often one for a number, which may be wrong in more ways."""
    is_number = [bool({int, float} & {*kinds_of(place.argument.hint)}) for place in found]
    return rng.choices(found, weights=[3 if number else 1 for number in is_number])[0]


def malformed(config: dict[str, Any], place: Place, rng: random.Random) -> Malformed:
    """The configuration with a fault at a place, drawn from those that its type allows."""
    kinds = kinds_of(place.argument.hint)
    numbers, texts = {int, float} & {*kinds}, str in kinds
    classes = [each for kind in kinds for each in classes_of(kind)]
    name = place.path[-1]
    faults: list[tuple[str, Any, bool]] = []
    if Any not in kinds:
        faults += [("keys for a value", {"a": {"b": [1]}}, dict not in map(get_origin, kinds))]
        if not any(get_origin(kind) in (list, tuple) or kind in (list, tuple) for kind in kinds):
            faults += [("a list for a value", [[1], "x"], True)]
        if type(None) not in kinds and not (place.argument.default is None and not place.argument.required):
            faults += [("null", None, True)]
        if not texts:
            faults += [("a word", "nonsense", True), ("an empty word", "", True)]
        if not numbers and bool not in kinds:
            faults += [("a number", 7.25, not any(get_origin(kind) is dict for kind in kinds))]
    if numbers:
        meaningful = name in MEANINGFUL
        faults += [("nan", math.nan, True), ("infinity", math.inf, not meaningful), ("negative", -3, not meaningful)]
        faults += [("negative infinity", -math.inf, not meaningful), ("zero", 0, False), ("huge", 10**9, False)]
        faults += [("huge", 10**18, False), ("a fraction", 1.5, float not in kinds), ("a long number", 1e300, False)]
    if texts:
        faults += [("a strange word", "a/../\0b", False), ("an empty word", "", False)]
    if classes:
        faults += [("a class of another kind", {"class_path": "torch.nn.Flatten"}, not _takes_modules(classes))]
        faults += [("a class that is none", {"class_path": "os.path"}, True), ("no class", {"class_path": 3}, True)]
        faults += [("null arguments", {"class_path": "torch.nn.Flatten", "init_args": None}, True)]
        faults += [("a function", {"class_path": "os.getcwd"}, True)]
    what, value, is_nonsense = rng.choice(faults)
    return Malformed(f"{what} ({value!r})", _with(config, place.path, value), place.key, is_nonsense)


def misspelt(config: dict[str, Any], place: Place, rng: random.Random) -> Malformed:
    """The configuration with a misspelt key or class."""
    node = _at(config, place.path[:-1])
    name = place.path[-1]
    if isinstance(name, str) and isinstance(node, dict):
        wrong = _swapped(name, rng)
        changed = copy.deepcopy(config)
        inner = _at(changed, place.path[:-1])
        inner[wrong] = inner.pop(name, {})
        return Malformed(f"a misspelt key, {wrong}", changed, wrong, True)
    return Malformed("an item that is nothing", _with(config, place.path, None), place.key, True)


def _takes_modules(classes: list[type]) -> bool:
    return any(each.__module__.startswith("torch.nn") for each in classes)


def _swapped(name: str, rng: random.Random) -> str:
    index = rng.randrange(len(name))
    return name[:index] + name[index] * 2 + name[index + 1 :]


def _at(node: Any, path: tuple[str | int, ...]) -> Any:
    for step in path:
        node = node[step]
    return node


def _with(config: dict[str, Any], path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    changed = copy.deepcopy(config)
    _at(changed, path[:-1])[path[-1]] = value
    return changed
