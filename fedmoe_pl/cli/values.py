"""Whether a value of a configuration fits a type."""

from __future__ import annotations

import math
from argparse import ArgumentError
from typing import Any, Literal, get_args, get_origin

from jsonargparse import ArgumentParser


def is_plain(value: Any, kinds: list[Any]) -> bool:
    """Whether the value is of one of the types without more ado; the parser decides about others."""
    if value is None:
        return type(None) in kinds
    if isinstance(value, list):
        return any(
            get_origin(kind) is list and all(is_plain(item, [*get_args(kind)]) for item in value) for kind in kinds
        )
    if is_nan(value):
        return False
    literals = [each for kind in kinds if get_origin(kind) is Literal for each in get_args(kind)]
    return type(value) in kinds or (type(value) is int and float in kinds) or value in literals


def is_nan(value: Any) -> bool:
    """Whether the value is not a number."""
    return isinstance(value, float) and math.isnan(value)


def parses(value: Any, hint: Any) -> bool:
    """Whether the parser takes the value for one of the type."""
    parser = ArgumentParser(exit_on_error=False)
    try:
        parser.add_argument("--value", type=hint)
    except ValueError:  # a type that the parser does not know
        return True
    try:
        parser.parse_object({"value": value})
    except ArgumentError:
        return False
    return True
