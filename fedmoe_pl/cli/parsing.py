"""What the parser has beside jsonargparse's: lists that replace lists, phases by name, checks of files and values."""

from __future__ import annotations

import contextlib
import functools
import inspect
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_type_hints

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader
from jsonargparse._actions import ActionConfigFile
from jsonargparse._typehints import ActionTypeHint
from jsonargparse._util import NestedArg, parse_value_or_config
from lightning.fabric.utilities.exceptions import MisconfigurationException
from yaml.nodes import MappingNode, SequenceNode

from fedmoe_pl.cli.errors import PHASES, did_you_mean, located, place_in, places, words_of

_load = get_loader("yaml")


class ConfigFile(ActionConfigFile):
    """A configuration file: each of its lists replaces the whole list of an earlier file.

    Without it, items of a list inherit what they leave out from those of a list before them, if both lists have the
    same length: a phase would have the rounds of another phase in its place.
    """

    def __call__(self, parser: ArgumentParser, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Applies the file to what the arguments before it say."""
        try:
            text = values if "{" in values else Path(values).expanduser().read_text(encoding="utf-8")
            content = load(text)
            if not isinstance(content, Mapping):
                raise MisconfigurationException("it must have keys and values, such as 'seed_everything: 0'")
        except (MisconfigurationException, OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            reason = " ".join(str(getattr(error, "strerror", None) or error).split())
            raise MisconfigurationException(f"config is '{values}', but it cannot be read: {reason}.") from error
        for key in _lists(content):
            if isinstance(cfg.get(key), list):
                cfg[key] = []
        super().__call__(parser, cfg, values, option_string)


def load(text: str) -> Any:
    """Reads YAML, in which no key may stand twice."""
    waiting, seen = [yaml.compose(text, Loader=yaml.SafeLoader)], set[int]()
    while waiting:
        node = waiting.pop()
        if isinstance(node, MappingNode) and id(node) not in seen:
            lines = dict[str, int]()
            for name, _ in node.value:
                line = name.start_mark.line + 1
                if name.value in lines:
                    raise MisconfigurationException(
                        f"line {line} has the key '{name.value}', which line {lines[name.value]} has already"
                    )
                lines[str(name.value)] = line
        if isinstance(node, MappingNode | SequenceNode) and id(node) not in seen:
            waiting += [item[1] if isinstance(item, tuple) else item for item in node.value]
        seen.add(id(node))
    return _load(text)


set_loader("yaml", load, exceptions=(yaml.YAMLError,))


def _lists(node: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """The keys of the lists in a configuration, but not of those in lists."""
    for name, value in node.items():
        if isinstance(value, list):
            yield f"{prefix}{name}"
        elif isinstance(value, Mapping):
            yield from _lists(value, f"{prefix}{name}.")


class ListAction(ActionTypeHint):
    """An argument that can be a list: errors say which item is wrong, and a phase can be changed by its name.

    jsonargparse itself takes ``--federation.phases.FedAvg.rounds`` for an argument of the last phase.
    """

    def _check_type(self, value: Any, append: bool = False, cfg: Any = None, mode: str | None = None) -> Any:
        """Parses a list, what is appended to it, or an argument of an item; the signature is the base's."""
        if isinstance(value, NestedArg):
            if self.dest != PHASES:
                return super()._check_type(value, append, cfg, mode)
            before = (cfg.get(self.dest) if cfg else None) or []
            index, argument = _phase_of(value, before)
            changed = self._item(before, index, argument, Namespace({self.dest: [before[index]]}), mode)
            return [*before[:index], *changed, *before[index + 1 :]]
        items = value
        with contextlib.suppress(yaml.YAMLError):
            items, _ = parse_value_or_config(value, enable_path=self._enable_path)
        try:
            return super()._check_type(value, append, None if isinstance(items, list) and not append else cfg, mode)
        except TypeError:
            items = items if isinstance(items, list) else [items] if append else []
            for index, item in enumerate(items):
                self._item(items, index, [item], None, mode)
            raise

    def _item(self, items: list[Any], index: int, value: Any, cfg: Any, mode: str | None) -> Any:
        """Parses one item of a list, or an argument of it."""
        try:
            return super()._check_type(value, False, cfg, mode)
        except TypeError as error:
            place = f'"{self.dest}{place_in(items, index, self.dest)}"'
            of_item = re.sub(r"list\[([\w.]+)\]", r"\1", str(error))
            raise TypeError(of_item.replace(f'"{self.dest}"', place, 1)) from error


def _phase_of(argument: NestedArg, phases: Sequence[Namespace]) -> tuple[int, NestedArg]:
    """The index of the phase that an argument of the command line names, and the argument without the name."""
    words = f"{argument.key}={argument.val}"  # a name may have dots and equals signs
    names = {phase.get("init_args", phase).name: index for index, phase in enumerate(phases)}
    name = max((name for name in names if words.startswith(f"{name}.")), key=len, default=None)
    if name is None:
        hint = did_you_mean(argument.key.partition(".")[0], names)
        raise MisconfigurationException(
            f"federation.phases.{argument.key} must name a phase that a --config before it has, and one of its "
            f"arguments, such as federation.phases.NAME.rounds{hint}"
        )
    key, _, value = words.removeprefix(f"{name}.").partition("=")
    return names[name], NestedArg(key=key, val=value)


def check_values(configuration: Mapping[str, Any]) -> None:
    """Refuses null where it is no value of an argument, which jsonargparse lets pass, and numbers that are none."""
    for key, value, class_path, _ in places(configuration):
        if isinstance(value, float) and math.isnan(value):
            raise MisconfigurationException(f"{key} is nan, but must be a finite number.")
        if value is None and key in ("trainer", "federation"):
            raise MisconfigurationException(f"{key} is null, but must have keys and values.")
        hint = _not_optional(class_path).get(key.rpartition(".")[2]) if value is None else None
        if hint is not None:
            raise MisconfigurationException(f"{key} is null, but must be {words_of(repr(hint))}.")


@functools.cache
def _not_optional(class_path: str) -> dict[str, Any]:
    """The types of a class's arguments that cannot be None."""
    class_type = located(class_path)
    if not inspect.isclass(class_type):
        return {}
    try:
        hints = get_type_hints(class_type.__init__)
    except NameError:  # of a type that is only imported where types are checked
        return {}
    parameters = inspect.signature(class_type).parameters
    return {
        name: hint
        for name, hint in hints.items()
        if name in parameters and parameters[name].default is not None
        if hint is not Any and type(None) not in get_args(hint)
    }
