"""Compares a configuration, as it was written, with the types that the parser knows, and names what does not fit.

The parser's own messages list every type that a value might have had, without the value's place in a list.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

from jsonargparse import ArgumentParser
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.loggers import Logger
from torch import nn
from torch.optim import Optimizer

from fedmoe_pl.aggregation import Aggregation
from fedmoe_pl.algorithms.algorithm import Algorithm
from fedmoe_pl.backends import Backend
from fedmoe_pl.callbacks import FederationCallback
from fedmoe_pl.checks import is_file_name
from fedmoe_pl.cli.reading import Inherited, names_file, read_file
from fedmoe_pl.cli.values import is_nan, is_plain, parses
from fedmoe_pl.cli.words import allowed, classes_of, did_you_mean, is_callable, is_list, kinds_of, shown
from fedmoe_pl.data import Augmentation, FederatedDataModule, Partitioner
from fedmoe_pl.models import Gate

PHASES = "federation.phases"
OVERLAY = "an overlay needs the --config that it changes before it"
_PLACES: dict[type, str] = {
    LightningModule: "model",
    FederatedDataModule: "data",
    Partitioner: "data.init_args.partitioner",
    Augmentation: "data.init_args.augmentation",
    Algorithm: "a phase's algorithm",
    Gate: "the gate of the model or of a phase",
    Aggregation: "a phase's aggregation",
    Backend: "federation.backend",
    FederationCallback: "federation.callbacks",
    Callback: "trainer.callbacks or a phase's callbacks",
    Logger: "federation.logger",
    Optimizer: "the optimizer of the model or of a phase",
    nn.Module: "the model's arguments",
}
"""Where the classes of each kind belong, the narrower kinds first."""
_INTERNAL = ("torchvision.", "torchmetrics.")  # whose layers and metrics nobody means by a name alone
_SECTIONS = {"model", "data"}
_OF_CLASS = ("class_path", "init_args", "dict_kwargs")


class Argument(NamedTuple):
    """An argument that the parser knows: its type, its default, and whether it must be given."""

    hint: Any
    default: Any
    required: bool


def arguments_of(parser: ArgumentParser) -> dict[str, Argument]:
    """The arguments of a parser, by name, such as ``trainer.devices``."""
    arguments = _arguments(parser)
    for name in _SECTIONS & arguments.keys():  # the parser adds null to the types of classes that must be given
        hint = next(kind for kind in kinds_of(arguments[name].hint) if kind is not type(None))
        arguments[name] = Argument(hint, ..., True)
    return arguments


def _arguments(parser: ArgumentParser) -> dict[str, Argument]:
    return {
        action.dest: Argument(getattr(action, "_typehint", Any), action.default, action.required)
        for action in parser._actions
        if action.option_strings and not action.dest.endswith("help")
    }


@functools.cache
def arguments_of_class(class_type: type) -> dict[str, Argument]:
    """The arguments of a class's constructor, by name."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(class_type, fail_untyped=False)
    return _arguments(parser)


def faults(configuration: Mapping[str, Any], arguments: Mapping[str, Argument]) -> Iterator[str]:
    """Yields a sentence for every part of a configuration that does not fit the arguments of the command.

    Args:
        configuration: what the user has written.
        arguments: the arguments of the command, see :func:`arguments_of`.
    """
    yield from _group_faults(configuration, arguments, "")


def _group_faults(group: Mapping[str, Any], arguments: Mapping[str, Argument], prefix: str) -> Iterator[str]:
    """The faults of the whole configuration, or of a section of it such as ``trainer``, whose name is the prefix."""
    below = {name.removeprefix(prefix): argument for name, argument in arguments.items() if name.startswith(prefix)}
    names = {name.split(".")[0] for name in below}
    for name, value in group.items():
        key = f"{prefix}{name}"
        if name not in names:
            yield f"{key} is not an argument{f' of {prefix[:-1]}' if prefix else ''}; {did_you_mean(name, names)}"
        elif not any(other.startswith(f"{name}.") for other in below):
            yield from _faults(value, below[name], key)
        elif isinstance(value, Mapping):
            yield from _group_faults(value, arguments, f"{key}.")
        elif names_file(value):
            content = read_file(value, key)
            if isinstance(content, Mapping):
                yield from _group_faults(content, arguments, f"{key}.")
            else:
                yield f"{key} is {shown(value)}, but the file must have keys and values."
        elif not (isinstance(value, str) and Path(value).is_file()):
            yield f"{key} is {shown(value)}, but must have keys and values."


def _faults(value: Any, argument: Argument, key: str) -> Iterator[str]:
    """The faults of an argument's value."""
    hint, kinds = argument.hint, kinds_of(argument.hint)
    classes = tuple(each for kind in kinds for each in classes_of(kind))
    items = [get_args(kind)[0] for kind in kinds if is_list(kind)]
    named = [get_args(kind)[1] for kind in kinds if get_origin(kind) is dict and classes_of(get_args(kind)[1])]
    if (classes or items) and str not in kinds and names_file(value):
        value = read_file(value, key)
    if Any in kinds or is_plain(value, kinds) or (value is None and argument.default is None and not argument.required):
        return
    if isinstance(value, list) and items:
        for index, item in enumerate(value):
            yield from _faults(item, Argument(items[0], ..., True), f"{key}{place_in(value, index, key)}")
    elif isinstance(value, Mapping) and named:
        for name, item in value.items():
            yield from _faults(item, Argument(named[0], ..., True), f"{key}.{name}")
    elif isinstance(value, Mapping) and classes:
        if value and set(value) <= {"init_args", "dict_kwargs"}:  # a change of another class, or of the default one
            if argument.default is None or argument.default is ...:
                yield f"{key} has no class_path; {OVERLAY}."
        else:
            yield from _faults_of_class(value, hint, classes, key)
    elif isinstance(value, str) and classes and str not in kinds and not Path(value).is_file():
        found = find_class(value, hint, classes, key)
        if inspect.isabstract(found):
            yield _of_abstract(value, found, key)
        elif inspect.isclass(found):
            yield from _missing(found, {}, hint, f"{key}.init_args")
        elif not parses(value, hint):
            yield found if isinstance(found, str) else f"{key} is {shown(value)}, but must be {allowed(hint)}."
    elif is_nan(value) and {int, float} & {*kinds}:
        yield f"{key} is nan, but must be a finite number."
    elif value is None or is_nan(value) or not parses(value, hint):
        example = f", such as [{value}]" if items and isinstance(value, str) and parses([value], hint) else ""
        yield f"{key} is {shown(value)}, but must be {allowed(hint)}{example}."


def _faults_of_class(node: Mapping[str, Any], hint: Any, classes: tuple[type, ...], key: str) -> Iterator[str]:
    """The faults of a value that names a class and its arguments."""
    if "class_path" in node:
        class_type, given, prefix = node["class_path"], node.get("init_args", {}), f"{key}.init_args"
        for name in node:
            if name not in _OF_CLASS:
                yield f"{key}.{name} is not a key of a class; {did_you_mean(str(name), _OF_CLASS)}"
        if not isinstance(class_type, str):
            yield f"{key}.class_path is {shown(class_type)}, but must be {allowed(hint)}."
            return
        class_type = find_class(class_type, hint, classes, key)
        if isinstance(class_type, str):
            yield class_type
            return
    elif similar := [name for name in node if difflib.get_close_matches(str(name), _OF_CLASS, n=1, cutoff=0.8)]:
        yield f"{key}.{similar[0]} is not a key of a class; {did_you_mean(similar[0], _OF_CLASS)}"
        return
    else:
        class_type, given, prefix = classes[0], node, key
    if not inspect.isclass(class_type):  # a function that makes an object
        if any(map(is_callable, kinds_of(hint))) or not parses(node, hint):
            yield f"{key} is {shown(node)}, but must be {allowed(hint)}."
        return
    if not isinstance(given, Mapping):
        yield f"{prefix} is {shown(given)}, but must have the arguments of {class_type.__name__}."
        return
    if inspect.isabstract(class_type):
        if "class_path" in node:
            yield _of_abstract(node["class_path"], class_type, key)
        else:
            yield f"{key} is {shown(node)}, but must be {allowed(hint)}."
        return
    if "class_path" not in node and not is_dataclass(class_type) and not {*node} & {*arguments_of_class(class_type)}:
        name = next(iter(node))
        yield f"{key}.{name} is given, but {key} has no class_path, which must name {allowed(class_type)}."
        return
    arguments = arguments_of_class(class_type)
    for name, value in given.items():
        if name in arguments:
            yield from _faults(value, arguments[name], f"{prefix}.{name}")
        elif not isinstance(given, Inherited):
            yield f"{prefix}.{name} is not an argument of {class_type.__name__}; {did_you_mean(str(name), arguments)}"
    yield from _missing(class_type, {**given, **(node.get("dict_kwargs") or {})}, hint, prefix)


def _missing(class_type: Any, given: Mapping[str, Any], hint: Any, key: str) -> Iterator[str]:
    """The arguments that a class needs and that are not given."""
    of_calls = [get_args(kind)[0] for kind in kinds_of(hint) if is_callable(kind) and get_args(kind)]
    later = max((len(parameters) for parameters in of_calls if isinstance(parameters, list)), default=0)
    for name, argument in [*arguments_of_class(class_type).items()][later:]:
        if argument.required and name not in given:
            yield f"{key}.{name} is required, but missing."


def find_class(name: str, hint: Any, classes: tuple[type, ...], key: str) -> Any:
    """The class, or a function that makes one; a sentence if there is no such class or it is of another kind."""
    known = {each.__name__: each for each in sub_classes(classes)}
    if name in known:
        return known[name]
    module, _, attribute = name.rpartition(".")
    if not module or not all(part.isidentifier() for part in name.split(".")):  # such as Dirichlet(0.5)
        if other := named(name):
            return _of_other_kind(name, other, hint, key)
        similar = difflib.get_close_matches(name, [*_concrete(known.values())], n=1, cutoff=0.65)
        hinted = f"; did you mean {similar[0]}?" if similar else f"; it must be {allowed(hint)}."
        return f"{key} is '{name}', which is neither a class of fedmoe_pl nor an import path{hinted}"
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever a user's module raises
        reason = " ".join(f"{error}".split()) or type(error).__name__
        return f"{key} is '{name}', which cannot be imported: {reason}."
    if not hasattr(found, attribute):
        similar = difflib.get_close_matches(attribute, dir(found), n=1)
        return (
            f"{key} is '{name}', but {module} has no {attribute}{f'; did you mean {similar[0]}?' if similar else '.'}"
        )
    found = getattr(found, attribute)
    if inspect.isclass(found) and not issubclass(found, classes):
        return _of_other_kind(name, found, hint, key)
    return found


def _of_other_kind(name: str, class_type: type, hint: Any, key: str) -> str:
    """A sentence for a class that does not belong where it is named, with the place where it does."""
    base = next((base for base in _PLACES if issubclass(class_type, base)), None)
    if base is None and issubclass(class_type, LightningDataModule):
        return f"{key} is '{name}', but must be {allowed(hint)}; give it to FromDataModule, which deals its samples."
    if base is None:
        return f"{key} is '{name}', which is not the kind of class that belongs there; it must be {allowed(hint)}."
    kind = allowed(base)
    return f"{key} is '{name}', which is {kind}, but must be {allowed(hint)}; {kind} belongs in {_PLACES[base]}."


def _of_abstract(name: str, class_type: type, key: str) -> str:
    """A sentence for a class that cannot be made, with those of its kind that can."""
    kinds = ", ".join(sorted(_concrete(sub_classes((class_type,)))))
    return f"{key} is '{name}', of which no object can be made; it must be one of its kinds: {kinds}."


def _concrete(classes: Iterable[type]) -> Iterator[str]:
    """The names of the classes of which objects can be made."""
    return (each.__name__ for each in classes if not inspect.isabstract(each))


def named(name: str) -> type | None:
    """The public class of this name, of any kind that a configuration can name; None if there is none."""
    found = (each for each in sub_classes(tuple(_PLACES)) if each.__name__ == name)
    return next((each for each in found if not each.__module__.startswith(_INTERNAL)), None)


def sub_classes(classes: tuple[type, ...]) -> Iterator[type]:
    """The public subclasses of some classes, and these themselves."""
    seen: set[type] = set()
    waiting = list(classes)
    while waiting:
        class_type = waiting.pop()
        if class_type not in seen:
            seen.add(class_type)
            waiting += type.__subclasses__(class_type)
            if not class_type.__name__.startswith("_"):
                yield class_type


def place_in(items: list[Any], index: int, key: str) -> str:
    """The place of an item in a list, as it is in keys: ``.FedAvg`` for a phase of this name, else ``[1]``.

    A phase whose name is refused, such as ``..``, has the place ``[1]``, too.

    Args:
        items: the list.
        index: the item's index.
        key: the list's key.
    """
    names = [item.get("name") if isinstance(item, Mapping) else None for item in items]
    name = names[index]
    is_phase = key == PHASES and isinstance(name, str) and is_file_name(name) and names.count(name) == 1
    return f".{name}" if is_phase else f"[{index}]"
