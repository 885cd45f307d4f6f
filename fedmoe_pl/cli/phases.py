"""Arguments of single phases on the command line, such as ``--federation.phases.FedAvg.rounds 5``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from lightning.fabric.utilities.exceptions import MisconfigurationException

from fedmoe_pl.cli.reading import Inherited, names_file, put, read_arguments, read_file, scalar
from fedmoe_pl.cli.schema import PHASES

_OPTION = f"--{PHASES}"


class _Dumper(yaml.SafeDumper):
    """Writes texts in quotation marks, so that none of them is read as a number."""


_Dumper.add_representer(str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"'))


def with_phases(arguments: Sequence[str]) -> list[str]:
    """The arguments of a command line, in which those of single phases are replaced by the list of all phases.

    The parser knows phases only as a list, and takes a name below a list for one of its last item.

    Args:
        arguments: the arguments of the command line. Files and arguments before that of a phase say which phases there
            are.

    Raises:
        MisconfigurationException: if an argument names no phase, or has no value; or a file cannot be read.
    """
    result, waiting = list[str](), [*arguments]
    while waiting:
        argument = waiting.pop(0)
        if not argument.startswith(f"{_OPTION}."):
            result.append(argument)
            continue
        phases = _phases(result, argument)
        phase, rest = _phase_of(argument, phases)
        key, equals, value = rest.partition("=")
        if not equals and (not waiting or waiting[0].startswith("--")):
            raise MisconfigurationException(f"{argument[2:]} has no value.")
        put(phase, [*key.split(".")], scalar(value if equals else waiting.pop(0)))
        if result[-2:-1] == [_OPTION]:
            del result[-2:]
        result += [_OPTION, yaml.dump(_written(phases), Dumper=_Dumper, default_flow_style=True, width=float("inf"))]
    return result


def _phases(arguments: Sequence[str], argument: str) -> list[Any]:
    """The phases that the arguments before an argument give, as they were written."""
    federation = _content(read_arguments(arguments).get("federation"))
    phases = _content(federation.get("phases")) if isinstance(federation, Mapping) else None
    if not isinstance(phases, list):
        raise MisconfigurationException(
            f"{argument[2:].partition('=')[0]} is an argument of a phase, but no --config before it has any."
        )
    return [dict(phase) if isinstance(phase, Mapping) else phase for phase in map(_content, phases)]


def _content(value: Any) -> Any:
    """A part of the configuration; if it names a file, what that has."""
    return read_file(value) if names_file(value) else value


def _phase_of(argument: str, phases: Sequence[Any]) -> tuple[dict[str, Any], str]:
    """The phase that an argument names, and the rest of the argument; a name may have dots."""
    rest = argument.removeprefix(f"{_OPTION}.")
    names = {str(phase["name"]): phase for phase in phases if isinstance(phase, dict) and "name" in phase}
    fitting = [name for name in names if rest.startswith(f"{name}.") and rest != f"{name}."]
    name = max(fitting, key=len, default=None)
    if name is None:
        word = rest.partition("=")[0]
        if word.rstrip(".") in names:
            raise MisconfigurationException(
                f"{PHASES}.{word} needs one of the phase's arguments, such as {PHASES}.{word.rstrip('.')}.rounds."
            )
        similar = difflib.get_close_matches(word.partition(".")[0], names, n=1)
        hint = f"did you mean {similar[0]}?" if similar else f"the phases are {', '.join(names)}."
        raise MisconfigurationException(
            f"{PHASES}.{word} names no phase and one of its arguments, such as {PHASES}.NAME.rounds; {hint}"
        )
    return names[name], rest.removeprefix(f"{name}.")


def _written(node: Any) -> Any:
    """A part of a configuration without what it inherits from another class: the parser knows what fits."""
    if isinstance(node, Mapping):
        return {name: _written(value) for name, value in node.items() if not isinstance(value, Inherited)}
    return [_written(item) for item in node] if isinstance(node, list) else node
