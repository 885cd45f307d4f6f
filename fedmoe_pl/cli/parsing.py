"""What the parser has beside jsonargparse's: lists that replace lists, phases by name, no key twice in a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin

import yaml
from jsonargparse import ArgumentParser, Namespace, get_loader, set_loader
from jsonargparse._actions import ActionConfigFile
from jsonargparse._typehints import ActionTypeHint
from jsonargparse._util import NestedArg, parse_value_or_config
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.cli.errors import PHASES, did_you_mean, place_in

_load = get_loader("yaml")


class ConfigFile(ActionConfigFile):
    """A configuration file: each of its lists replaces the whole list of an earlier file.

    Without it, items of a list inherit what they leave out from those of a list before them, if both lists have the
    same length: a phase would have the rounds of another phase in its place.
    """

    def __call__(self, parser: ArgumentParser, cfg: Any, values: Any, option_string: str | None = None) -> None:
        """Applies the file to what the arguments before it say."""
        try:
            content = load(values if "{" in values else Path(values).expanduser().read_text(encoding="utf-8"))
            if not isinstance(content, Mapping):
                raise ValueError("it has no keys")
        except (MisconfigurationException, OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            reason = " ".join(str(getattr(error, "strerror", None) or error).split())
            raise MisconfigurationException(f"config is '{values}', but it cannot be read: {reason}.") from error
        for key in _lists(content):
            if isinstance(cfg.get(key), list):
                cfg[key] = []
        super().__call__(parser, cfg, values, option_string)


class _EveryKeyOnce(yaml.SafeLoader):
    """Refuses a key that stands twice, of which YAML takes the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of a node; the signature is the base's."""
        names = [name for name, _ in node.value if isinstance(name, yaml.ScalarNode)]
        seen = set[str]()
        for name in names:
            if name.value in seen:
                raise MisconfigurationException(f"line {name.start_mark.line + 1} has the key '{name.value}' again")
            seen.add(name.value)
        return super().construct_mapping(node, deep)


def load(text: str) -> Any:
    """Reads YAML as jsonargparse does, but no key may stand twice."""
    yaml.load(text, _EveryKeyOnce)
    return _load(text)


set_loader("yaml", load, exceptions=(yaml.YAMLError,))


def _lists(node: Any, prefix: str = "") -> Iterator[str]:
    """The keys of the lists in a configuration, but not of those in lists."""
    for name, value in node.items() if isinstance(node, Mapping) else ():
        if isinstance(value, list):
            yield f"{prefix}{name}"
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
            with _naming(f"{PHASES}{place_in(before, index, PHASES)}"):
                changed = super()._check_type(argument, False, Namespace({PHASES: [before[index]]}), mode)
            return [*before[:index], *changed, *before[index + 1 :]]
        items = value
        with contextlib.suppress(yaml.YAMLError):
            items, _ = parse_value_or_config(value, enable_path=self._enable_path)
        try:
            return super()._check_type(value, append, None if isinstance(items, list) and not append else cfg, mode)
        except TypeError:
            items = items if isinstance(items, list) else [items] if append else []
            of_item: Any = ActionTypeHint(typehint=_type_of_items(self._typehint))(option_strings=[], dest="item")
            for index, item in enumerate(items):
                with _naming(f"{self.dest}{place_in(items, index, self.dest)}"):
                    of_item._check_type(item)
            raise


@contextlib.contextmanager
def _naming(key: str) -> Iterator[None]:
    """In this context, an error names this key, and not that of the whole list."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f'Parser key "{key}":') from error.__cause__


def _type_of_items(hint: Any) -> Any:
    """The type of the items of a type that may be a list of them."""
    lists = (each for each in (hint, *get_args(hint)) if get_origin(each) in (list, Iterable))
    return get_args(next(lists))[0]


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
