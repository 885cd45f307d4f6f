"""Error messages of the command line: one line each, with the configuration key that is wrong."""

from __future__ import annotations

import difflib
import importlib
import re
from argparse import ArgumentError
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException

import fedmoe_pl.algorithms
import fedmoe_pl.backends
import fedmoe_pl.data
import fedmoe_pl.models

_BACKENDS = [name for name in fedmoe_pl.backends.__all__ if name.endswith("Backend")]
_CLASSES = [*_BACKENDS, *fedmoe_pl.algorithms.__all__, *fedmoe_pl.data.__all__, *fedmoe_pl.models.__all__]
_REFUSAL = re.compile(
    r"(?:Phase '(?P<phase>.*?)': )?(?:(?P<owner>\w+): )?"
    r"(?P<argument>\w+) (?:is|has|gives|weighs|reads|must) (?P<rest>.+)"
)
_OF_PARSER = ("Expected ", "Parser key ", "Problem with ", "Does not validate ")  # how jsonargparse's reasons begin
_OVERLAY = "an overlay needs the --config that it changes before it"


def one_sentence(message: str) -> str:
    r"""Condenses a message of jsonargparse, which has many nested lines, to one sentence.

    Example:
        >>> one_sentence('Parser key "data":\n  Errors:\n    - Parser key "n":\n'
        ...              "        Expected a <class 'int'>. Got value: x\n    - Expected a <class 'NoneType'>")
        "data.init_args.n is 'x', but must be int."
    """
    key = ".init_args.".join(re.findall(r'Parser key "([^"]+)"', message)).replace("phases.init_args.", "phases.")
    if match := re.search(r"Option '([^']+)' is not accepted(?:\. Got value: \w+\(class_path='([^']+)')?", message):
        # a class that is only made later, such as an optimizer, is in the value
        class_path = match[2] or re.findall(r"given class_path '([^']+)'", message)[-1]
        return _unknown_option(f"{key}.{'' if key.endswith('phases') else 'init_args.'}{match[1]}", class_path)
    if match := re.search(r"arguments are required: (.+)", message):
        missing = match[1].strip().replace("fit.", "")
        if key:
            return f"{key}.{'' if key.endswith('phases') else 'init_args.'}{missing} is required, but missing."
        return f"no --config has {missing.replace(', ', ' and ')}; {_OVERLAY}."
    if match := re.search(r"module '(\S+)' has no attribute '(\w+)'", message):
        return f"{key} is '{match[1]}.{match[2]}', but {match[1]} has no {match[2]}."
    if match := re.search(r"class_path '([^']+)':\s+(No module named '[^']+')", message):
        return f"{key} is '{match[1]}', which cannot be imported: {match[2]}."
    if match := re.search(r"Expected a dot import path string: (\S+)", message):
        if match[1] in _CLASSES:
            return f"{key} is '{match[1]}', which is not the kind of class that belongs there."
        similar = difflib.get_close_matches(match[1], _CLASSES, n=1)
        hint = f"; did you mean {similar[0]}?" if similar else "."
        return f"{key} is '{match[1]}', which is neither a class of fedmoe_pl nor an import path{hint}"
    value = re.search(r"(?:Got value|Given value): (.+)", message)
    if value and (match := re.search(r"Expected a typing\.Literal\[(.+?)\]", message)):
        return f"{key} is '{value[1]}', but must be {match[1].replace(', ', ' or ')}."
    others = [line for line in re.findall(r"^ *- (.+)$", message, re.MULTILINE) if not line.startswith(_OF_PARSER)]
    if value and others:  # what importing the class raised, or a class of another kind
        return f"{key} is '{value[1]}', which cannot be used: {'; '.join(dict.fromkeys(others))}."
    expected = [name for name in re.findall(r"Expected a <class '([^']+)'>", message) if name != "NoneType"]
    if expected:
        allowed = " or ".join(dict.fromkeys(expected))
        return f"{key} is '{value[1] if value else ''}', but must be {allowed}."
    return " ".join(line.strip(" -") for line in message.splitlines()).replace('Parser key "', "").replace('":', ":")


def phase_error(arguments: Sequence[str], parser: ArgumentParser) -> str | None:
    """Says which phase of a configuration file cannot be parsed, which jsonargparse does not tell of a list.

    Args:
        arguments: the arguments of the command line.
        parser: a parser of nothing but the group ``federation``; it tries each phase by itself.

    Returns:
        The sentence, with a key such as ``federation.phases[2].roundz``; None if each phase can be parsed.
    """
    for file in re.findall(r"^(?:--config|-c)[=\n](.+)$", "\n".join(arguments), re.MULTILINE):
        federation = (yaml.safe_load(Path(file).read_text()) or {}).get("federation")
        phases = federation.get("phases") if isinstance(federation, dict) else None
        for index, phase in enumerate(phases if isinstance(phases, list) else []):
            try:
                parser.parse_object({"federation": {"phases": [phase]}})
            except ArgumentError as error:
                return one_sentence(str(error)).replace("federation.phases", f"federation.phases[{index}]", 1)
    return None


def cause_of(error: BaseException) -> str:
    """The message of the ``MisconfigurationException`` behind an exception, else the exception's message, condensed."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, MisconfigurationException):
        cause = cause.__cause__ or cause.__context__
    return " ".join(str(cause).split()) if cause is not None else one_sentence(str(error))


def with_key(message: str, configuration: Mapping[str, Any]) -> str:
    """Replaces an argument's name in a message by its key in the configuration, if exactly one key fits.

    Classes do not know their place in a configuration. They name one of their arguments or another class's, as in
    ``Dirichlet: alpha is -1.0, but ...``, ``Phase 'FedAvg': rounds is 0, but ...`` or ``num_clients is 0, but ...``.

    Args:
        message: the message of a class or a check.
        configuration: the parsed configuration.

    Returns:
        The message with the key in place of the argument, or unchanged if no key or several fit.

    Example:
        >>> partitioner = {"class_path": "fedmoe_pl.data.Dirichlet", "init_args": {"alpha": -1.0}}
        >>> with_key("Dirichlet: alpha is -1.0, but must be above 0.", {"data": {"partitioner": partitioner}})
        'Dirichlet: data.partitioner.init_args.alpha is -1.0, but must be above 0.'
    """
    match = _REFUSAL.fullmatch(message)
    if match is None:
        return message
    phase, owner, argument, rest = match.group("phase", "owner", "argument", "rest")
    candidates = [place for place in _places(configuration) if place.argument == argument]
    narrower: list[Callable[[_Place], bool]] = [
        lambda place: phase is None or place.phase == phase,
        lambda place: owner is None or place.owner == owner,
        lambda place: _is_shown(place.value, rest),
    ]
    for fits in narrower:
        candidates = [place for place in candidates if fits(place)] or candidates
    if len(candidates) != 1 or not (owner in (None, candidates[0].owner) or _is_shown(candidates[0].value, rest)):
        return message
    start = match.start("argument")
    return message[:start] + candidates[0].key + message[start + len(argument) :]


class _Place(NamedTuple):
    """An argument of the configuration: its key, its value, and the class and the phase that it belongs to."""

    key: str
    argument: str
    value: Any
    owner: str | None
    phase: str | None


def _places(node: Any, key: str = "", owner: str | None = None, phase: str | None = None) -> Iterator[_Place]:
    """Yields every argument in a part of the configuration."""
    if isinstance(node, list):
        are_phases = key == "federation.phases"
        for index, item in enumerate(node):
            phase_name = item["name"] if are_phases else phase
            yield from _places(item, f"{key}[{index}]", "Phase" if are_phases else None, phase_name)
    elif isinstance(node, Mapping):
        for name, value in node.items():
            child = f"{key}.{name}" if key else name
            if name == "init_args" and "class_path" in node:
                yield from _places(value, child, node["class_path"].rsplit(".", 1)[-1], phase)
                continue
            yield _Place(child, name, value, owner, phase)
            yield from _places(value, child, "Federation" if child == "federation" else None, phase)


def _is_shown(value: Any, rest: str) -> bool:
    """Whether the rest of a message begins with the argument's value, or with the name of the value's class."""
    texts = [str(value), repr(value)]
    if value is None:
        texts += ["null", "not set"]
    elif isinstance(value, bool):
        texts.append(str(value).lower())
    elif isinstance(value, Mapping) and "class_path" in value:
        name = value["class_path"].rsplit(".", 1)[-1]
        texts += [name, f"a {name}", f"an {name}"]
    return any(re.match(rf"{re.escape(text)}(?:[,;: ]|\.$)", rest) for text in texts)


def _unknown_option(key: str, class_path: str) -> str:
    module, name = class_path.rsplit(".", 1)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(getattr(importlib.import_module(module), name), fail_untyped=False)
    if name == "LightningModule":  # the base class, while the model's class is unknown
        return f"{key} is given, but model has no class_path; {_OVERLAY}."
    allowed = sorted({option.split(".")[0] for option in parser.get_defaults().keys()})
    similar = difflib.get_close_matches(key.rsplit(".", 1)[-1], allowed, n=1)
    hint = f"did you mean {similar[0]}?" if similar else f"it has {', '.join(allowed)}."
    return f"{key} is not an argument of {name}; {hint}"
