"""Error messages of the command line: one line each, with the configuration key that is wrong."""

from __future__ import annotations

import difflib
import inspect
import pydoc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any, NamedTuple

from jsonargparse import ArgumentParser, Namespace
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from torch.optim import Optimizer

from fedmoe_pl.checks import InvalidArgumentError, shown
from fedmoe_pl.cli.listing import KINDS
from fedmoe_pl.data import FederatedDataModule

_NOISE = re.compile(
    r"Does not validate|Errors:|Given value|Expected a path but|Subclass types|an? (class|dict) |Parser.*Unable"
)
_VALUE = re.compile(
    r"(?:Got value|Given value|path string|path format): (.*?)(?:\. Got value.*)?$|Import path (\S+) does"
)
_EXPECTED = re.compile(
    r"Expected an? (?:dot import|<|typing|list)|Unexpected import path|Import path|Not a valid subclass"
)
_KNOWN = [each.__name__ for classes in KINDS.values() for each in classes]


_LONGEST = 80  # of a value
_OVERLAY = "An overlay needs the --config that it changes before it."
PHASES = "federation.phases"
_CLASSES = {  # of the sections of a configuration that name none
    "trainer": "lightning.pytorch.Trainer",
    "federation": "fedmoe_pl.Federation",
    "failures": "fedmoe_pl.ClientFailures",
    "phases": "fedmoe_pl.Phase",
    "select": "fedmoe_pl.Select",
    "evaluate": "fedmoe_pl.Evaluate",
}


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """The end of a sentence about an unknown name: a full stop, or the name that was probably meant."""
    similar = difflib.get_close_matches(name, [*names], n=1)
    return f"; did you mean {similar[0]}?" if similar else "."


def cause_of(error: BaseException, parser: ArgumentParser | None = None) -> str:
    """The message of the ``MisconfigurationException`` behind an exception, else the exception's message, condensed."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, MisconfigurationException):
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(cause).split()) if cause is not None else condensed(str(error), parser)


def condensed(message: str, parser: ArgumentParser | None = None) -> str:
    r"""Condenses a message of jsonargparse, which has many nested lines, to one sentence.

    Args:
        message: the message.
        parser: the parser of the command, whose arguments are suggested for unknown ones.

    Example:
        >>> condensed('Parser key "data":\n  Problem with given class_path \'fedmoe_pl.data.Digits\':\n'
        ...           '    Parser key "num_clients":\n      Expected a <class \'int\'>. Got value: ten')
        "data.init_args.num_clients is 'ten', but must be int."
    """
    key, class_type, value, allowed, lines = _innermost(message)
    text = "\n".join(lines) or message
    place = key.removesuffix(".init_args")
    if match := re.search(r"arguments are required: (.+)", text):
        names = [re.sub(r"^(?!federation|trainer)\w+\.", "", name) for name in match[1].split(", ")]
        is_of_file = {*names} & {"model", "data", PHASES}
        end = f", as in a file after --config. {_OVERLAY}" if is_of_file else ""
        return f"{key}{key and '.'}{' and '.join(names)} must be given{end or '.'}"
    if match := re.search(r"not accepted before subcommand '(\w+)'", text):
        return f"options must come after the command, as in fedmoe {match[1]} --config quickstart."
    if text.startswith('expected "subcommand"'):
        return "a command must be given, as in fedmoe fit --config quickstart; fedmoe --help lists all."
    if match := re.search(r"unrecognized arguments: (?:--)?([^\s=]+)|(?:Option|accept option) '(.+?)'", text):
        owner = ""
        if inspect.isclass(class_type):  # of some types, jsonargparse shows typing.Union
            parser, owner = ArgumentParser(exit_on_error=False), f" of {class_type.__name__}"
            parser.add_class_arguments(class_type, fail_untyped=False)
        names = [*parser.get_defaults().keys(), "class_path", "init_args"] if parser else []
        name = match[1] or match[2]
        sections = {each.partition(".")[0] for each in names}
        is_section = name.partition(".")[0] in sections
        end = did_you_mean(name, names) if is_section else did_you_mean(name.partition(".")[0], sections)
        is_base = class_type in (LightningModule, FederatedDataModule, Optimizer)
        end = f"; a class_path must be given. {_OVERLAY}" if is_base else end
        return f"{key}{key and '.'}{name} is not an argument{owner}{end}"
    reasons = [line.partition(". Got value:")[0] for line in lines if not _EXPECTED.match(line)]
    reason = "; ".join(dict.fromkeys(reasons)).replace("'NoneType' object has no attribute 'keys'", "init_args is null")
    names_class = "import path" in text and value
    if not allowed and not names_class:
        return f"{place}{place and ': '}{(reason or ' '.join(text.split())).rstrip('.')}."
    value = value if len(value) <= _LONGEST else f"{value[:_LONGEST]} ..."
    quoted = value if re.match(r"[\[{\d-]|None$|nan$|True$|False$", value) else repr(value)
    end = did_you_mean(value, _KNOWN) if names_class and value not in _KNOWN else "."
    return f"{place} is {quoted}, but must be {allowed or 'a class or its import path'}{reason and f' ({reason})'}{end}"


def _innermost(message: str) -> tuple[str, Any, str, str, list[str]]:
    """The key, the class that it belongs to, the value, the types that are allowed, and the other lines of a message.

    Of several types that a value might have had, it follows the first one whose arguments the message talks about.
    """
    key, class_type, value, types, lines, depth, is_left = "", None, "", list[str](), list[str](), -1, False
    for line in message.splitlines():
        indent, text = len(line) - len(line.lstrip()), line.strip(" -")
        is_left = is_left or (indent <= depth and bool(lines))
        if (match := _VALUE.search(text)) and not value:
            value = (match[1] or match[2]).strip()
        if is_left or not text or _NOISE.match(text):
            continue
        below, of_class = re.search(r'Parser key "(.+?)"', text), re.search(r"class_path[ =]'(.+?)'", text)
        if of_class:
            class_type = located(of_class[1])
        if "callable class:" in text or (text.startswith("Problem") and not is_dataclass(class_type)):
            key, depth, types, lines = f"{key}.init_args", indent, [], []
        elif text.startswith("Problem"):
            depth, types, lines = indent, [], []
        if below and below[1] != key:
            is_whole = not key or below[1].startswith(f"{key}.")
            key, depth, types, lines = below[1] if is_whole else f"{key}.{below[1]}", indent, [], []
        elif match := re.match(r"Subtypes: \[(.*)\]", text):
            types = [match[1]]
        elif not text.startswith("Problem"):
            lines.append(text.rpartition("callable class: ")[2])
            expected = re.match(r"Expected an? (<.*?>|(?:typing\S*|list)\[.*?\])|.* subclass of (\w+)", text)
            types += [expected[1] or expected[2]] if expected else []
    return key, class_type, value, words_of(types[0]) if types else "", lines


def located(path: str) -> Any:
    """The object of an import path, None if there is none."""
    try:
        return pydoc.locate(path)
    except pydoc.ErrorDuringImport:
        return None


def words_of(types: str) -> str:
    """The names of types as jsonargparse shows them, such as ``int or null``.

    Example:
        >>> words_of("<class 'torch.Tensor'>, typing.Literal['a', 'b'], list[fedmoe_pl.Phase], <class 'NoneType'>")
        "Tensor or 'a' or 'b' or list[Phase] or null"
    """
    short = re.sub(r"(?:[A-Za-z_]\w*\.)+", "", re.sub(r"<class '(.+?)'>", r"\1", types)).replace("NoneType", "null")
    return re.sub(r", (?![^\[]*\])", " or ", re.sub(r"Literal\[(.*?)\]", r"\1", short))


class Place(NamedTuple):
    """An argument in a configuration: its key, its value, the class whose argument it is, and the name of its phase."""

    key: str
    value: Any
    class_path: str
    phase: str


def places(node: Any, key: str = "", class_path: str = "", phase: str = "") -> Iterator[Place]:
    """Every argument in a parsed configuration."""
    if isinstance(node, list | tuple):
        for index, item in enumerate(node):
            child = f"{key}{place_in(node, index, key)}"
            yield Place(child, item, class_path, phase)
            yield from places(item, child, class_path, item["name"] if key == PHASES else phase)
    elif isinstance(node, Mapping):
        if "class_path" in node:
            key, class_path, node = f"{key}.init_args", node["class_path"], node.get("init_args") or {}
        for name, value in node.items():
            child = f"{key}.{name}" if key else name
            yield Place(child, value, class_path, phase)
            has_sections = class_path in ("", *_CLASSES.values())
            yield from places(value, child, _CLASSES.get(name, "") if has_sections else "", phase)


def place_in(items: Sequence[Any], index: int, key: str) -> str:
    """The place of an item in the list of this key, as it is in keys: ``.FedAvg`` for a phase, else ``[1]``."""
    settings = [item.get("init_args", item) if isinstance(item, Mapping | Namespace) else {} for item in items]
    names = [each.get("name") for each in settings]
    is_named = key == PHASES and isinstance(names[index], str) and names.count(names[index]) == 1
    return f".{names[index]}" if is_named else f"[{index}]"


def with_key(error: InvalidArgumentError, configuration: Mapping[str, Any]) -> str:
    """The sentence of an exception with the argument's key in the configuration, if its fields tell which it is."""
    named = [place for place in places(configuration) if f".{place.key}".endswith(f".{error.argument}")]
    owned = [place for place in named if error.owner in _owners(place)]
    same = [place for place in owned or named if _shown(place.value) == error.value]
    found = next((each for each in (same, owned) if len(each) == 1), same if owned else [])
    keys = " or ".join(place.key for place in found)
    return error.sentence(keys).removeprefix(f"{error.owner}: ") if found else str(error)


def _owners(place: Place) -> tuple[str, ...]:
    """The names that whoever refuses an argument may give to what it belongs to."""
    name, phase = place.class_path.rpartition(".")[2], f"Phase '{place.phase}'"
    return name, phase, f"{phase}: {name}"


def _shown(value: Any) -> str:
    is_class = isinstance(value, Mapping) and "class_path" in value
    return f"a {value['class_path'].rpartition('.')[2]}" if is_class else shown(value)
