"""Types in words, and values as messages show them."""

from __future__ import annotations

import collections.abc
import datetime
import difflib
import enum
import inspect
import re
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from torch import Tensor

_LONGEST = 80


def kinds_of(hint: Any) -> list[Any]:
    """The types that a type stands for: those of a union, without tensors, which cannot be written down."""
    if get_origin(hint) in (Union, types.UnionType):
        return [kind for each in get_args(hint) for kind in kinds_of(each)]
    return [] if hint is Tensor else [hint]


def is_callable(kind: Any) -> bool:
    """Whether a value of this type is made by a call, as an optimizer is of a model's parameters."""
    return get_origin(kind) is collections.abc.Callable


def is_list(kind: Any) -> bool:
    """Whether a value of this type is written as a list."""
    return get_origin(kind) in (list, collections.abc.Iterable, collections.abc.Sequence)


def classes_of(kind: Any) -> list[type]:
    """The classes of which a value of this type is made: those of the package, of PyTorch and of users.

    Example:
        >>> from typing import Callable
        >>> classes_of(Callable), classes_of(Callable[[list], Any]), classes_of(Callable[..., int])
        ([], [], [])
    """
    if is_callable(kind):
        results = get_args(kind)[1:]  # none if nothing is said of what the callable returns
        return [each for result in results for member in kinds_of(result) for each in classes_of(member)]
    is_class = inspect.isclass(kind) and get_origin(kind) is None and kind.__module__ not in ("builtins", "typing")
    return [kind] if is_class and not issubclass(kind, (Path, datetime.timedelta, enum.Enum)) else []


def shown(value: Any) -> str:
    """A value of a configuration as a message shows it: as in YAML, and not too long."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
        return value["class_path"].rsplit(".", 1)[-1]
    text = " ".join(repr(value).split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 4]} ..."


def allowed(hint: Any) -> str:
    """The values of a type in words, such as ``int or null``."""
    return " or ".join(dict.fromkeys(words for kind in kinds_of(hint) for words in _words(kind)))


def _words(kind: Any) -> list[str]:
    if kind is type(None):
        return ["null"]
    if get_origin(kind) is Literal:
        return [repr(value) for value in get_args(kind)]
    if is_list(kind):
        item = allowed(get_args(kind)[0])
        return [f"a list of {re.sub(r'^an? ', '', item)}"]
    if get_origin(kind) is dict or kind is dict:
        return ["keys and values"]
    if classes := classes_of(kind):
        return [f"{_article(each.__name__)} {each.__name__}" for each in classes]
    return [getattr(kind, "__name__", str(kind))]


def _article(name: str) -> str:
    """``an`` before a vowel and before an abbreviation that is read as one, such as LRScheduler."""
    return "an" if re.match(r"[AEIOU]|[FHLMNRSX][A-Z]", name) else "a"


def did_you_mean(name: Any, names: Iterable[str]) -> str:
    """The end of a sentence about a name that is unknown: the similar one of the known names, or all of them."""
    names = sorted(names)
    similar = difflib.get_close_matches(str(name), names, n=1)
    if similar:
        return f"did you mean {similar[0]}?"
    return f"it has {', '.join(names)}." if names else "it has none."
