"""What jsonargparse says in a tree of lines, in one sentence that names the key, the value and what is allowed."""

from __future__ import annotations

import difflib
import importlib
import re

from jsonargparse import ArgumentParser
from lightning.fabric.utilities.exceptions import MisconfigurationException

import fedmoe_pl.algorithms
import fedmoe_pl.backends
import fedmoe_pl.data
import fedmoe_pl.models

_BACKENDS = [name for name in fedmoe_pl.backends.__all__ if name.endswith("Backend")]
_CLASSES = [*_BACKENDS, *fedmoe_pl.algorithms.__all__, *fedmoe_pl.data.__all__, *fedmoe_pl.models.__all__]


def one_sentence(message: str) -> str:
    r"""Condenses a message of jsonargparse.

    Example:
        >>> one_sentence('Parser key "data":\n  Errors:\n    - Parser key "n":\n'
        ...              "        Expected a <class 'int'>. Got value: x\n    - Expected a <class 'NoneType'>")
        "data.init_args.n is 'x', but must be int."
    """
    key = ".init_args.".join(re.findall(r'Parser key "([^"]+)"', message)).replace("phases.init_args.", "phases.")
    if match := re.search(r"Option '([^']+)' is not accepted", message):
        class_path = re.findall(r"given class_path '([^']+)'", message)[-1]
        return _unknown_option(f"{key}.{'' if key.endswith('phases') else 'init_args.'}{match[1]}", class_path)
    if match := re.search(r"arguments are required: (.+)", message):
        missing = match[1].strip().replace("fit.", "")
        return (
            f"{key}.init_args.{missing} is required, but missing." if key else f"{missing} are missing; give --config."
        )
    if match := re.search(r"module '(\S+)' has no attribute '(\w+)'", message):
        return f"{key} is '{match[1]}.{match[2]}', but {match[1]} has no {match[2]}."
    if match := re.search(r"Expected a dot import path string: (\S+)", message):
        if match[1] in _CLASSES:
            return f"{key} is '{match[1]}', which is not the kind of class that belongs there."
        similar = difflib.get_close_matches(match[1], _CLASSES, n=1)
        hint = f"; did you mean {similar[0]}?" if similar else "."
        return f"{key} is '{match[1]}', which is neither a class of fedmoe_pl nor an import path{hint}"
    if match := re.search(r"Expected a typing\.Literal\[(.+?)\]\. Got value: (.+)", message):
        return f"{key} is '{match[2]}', but must be {match[1].replace(', ', ' or ')}."
    expected = [name for name in re.findall(r"Expected a <class '([^']+)'>", message) if name != "NoneType"]
    if expected:
        value = re.search(r"(?:Got value|Given value): (.+)", message)
        allowed = " or ".join(dict.fromkeys(expected))
        return f"{key} is '{value[1] if value else ''}', but must be {allowed}."
    return " ".join(line.strip(" -") for line in message.splitlines()).replace('Parser key "', "").replace('":', ":")


def cause_of(error: BaseException) -> str:
    """The sentence of the refusal that an exception was raised from, else the exception's own message, condensed."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, MisconfigurationException):
        cause = cause.__cause__ or cause.__context__
    return str(cause) if cause is not None else one_sentence(str(error))


def _unknown_option(key: str, class_path: str) -> str:
    module, name = class_path.rsplit(".", 1)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(getattr(importlib.import_module(module), name), fail_untyped=False)
    allowed = sorted({option.split(".")[0] for option in parser.get_defaults().keys()})
    similar = difflib.get_close_matches(key.rsplit(".", 1)[-1], allowed, n=1)
    hint = f"did you mean {similar[0]}?" if similar else f"it has {', '.join(allowed)}."
    return f"{key} is not an argument of {name}; {hint}"
