"""Error messages of the command line: one line each, with the configuration key that is wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.cli.schema import OVERLAY, PHASES, place_in

_REFUSAL = re.compile(
    r"(?:Phase '(?P<phase>.*?)': )?(?:(?P<owner>\w+): )?"
    r"(?P<argument>[\w.]+) (?:is|has|gives|weighs|reads|must) (?P<rest>.+)"
)

_OWNERS = {"federation": "Federation", "federation.failures": "ClientFailures"}


def one_sentence(message: str) -> str:
    r"""Condenses a message of jsonargparse, which has many nested lines, to one sentence.

    Example:
        >>> one_sentence('Parser key "data":\n  Errors:\n    - Parser key "n":\n    - Expected an int')
        'data: Errors: n: Expected an int'
    """
    key = ".init_args.".join(re.findall(r'Parser key "([^"]+)"', message))
    if match := re.search(r"arguments are required: (.+)", message):
        missing = re.sub(r"\b[a-z]+\.(?=federation\.|data\b|model\b)", "", match[1].strip())
        if key:
            return f"{key}.init_args.{missing} is required, but missing."
        of_command = re.fullmatch(r"(serve|join)\.(\w+)", missing)
        if of_command:
            return f"{of_command[1]}: {of_command[2]} is required, but missing."
        return f"no --config has {' and '.join(missing.split(', '))}; {OVERLAY}."
    return " ".join(line.strip(" -") for line in message.splitlines()).replace('Parser key "', "").replace('":', ":")


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
    candidates = [place for place in _places(configuration) if f".{place.key}".endswith(f".{argument}")]
    narrower: list[Callable[[_Place], bool]] = [
        # an argument of the phase that is null is not the one whose value is shown
        lambda place: phase is None or (place.phase == phase and (place.value is not None or _is_shown(None, rest))),
        lambda place: owner is None or place.owner == owner,
        lambda place: _is_shown(place.value, rest),
    ]
    for fits in narrower:
        candidates = [place for place in candidates if fits(place)] or candidates
    shows = [_is_shown(place.value, rest) for place in candidates]
    owners = [owner in (None, place.owner) for place in candidates]
    if len(candidates) == 1 and not (owners[0] or shows[0]):
        return message
    if len(candidates) != 1 and not (candidates and owner and all(shows) and all(owners)):
        return message
    keys = " or ".join(place.key for place in candidates)
    head = message[: match.start("argument")]
    if all(place.key.startswith(f"{PHASES}.{phase}.") for place in candidates):
        head = head.removeprefix(f"Phase '{phase}': ")
    return head + keys + message[match.end("argument") :]


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
        are_phases = key == PHASES
        for index, item in enumerate(node):
            phase_name = item["name"] if are_phases else phase
            yield from _places(item, f"{key}{place_in(node, index, key)}", "Phase" if are_phases else None, phase_name)
    elif isinstance(node, Mapping):
        for name, value in node.items():
            child = f"{key}.{name}" if key else name
            if name == "init_args" and "class_path" in node:
                yield from _places(value, child, node["class_path"].rsplit(".", 1)[-1], phase)
                continue
            yield _Place(child, name, value, owner, phase)
            yield from _places(value, child, _OWNERS.get(child), phase)


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
