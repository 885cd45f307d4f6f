"""Checks of the arguments of any class; a refusal names the class, the argument, its value, and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

MOST_COUNTED = 1_000_000_000
"""The most rounds, epochs, samples in a batch, and the like: more would not end, or not fit into 64 bits."""
MOST_UNITS = 1_000_000
"""The most classes, and the most numbers in a tensor's shape or a list, of a message."""
MOST_EXPERTS = 10_000
"""The most experts or clusters of a model: a number with too many zeros would take all memory of the machine."""
_LONGEST_VALUE = 300  # characters
_LONGEST_NAME = 200  # bytes; a file's name has at most 255, and some have a suffix


class InvalidArgumentError(MisconfigurationException):
    """An argument that is refused.

    Its text is made of its parts, so that whoever knows where the argument stands in a configuration can say so.

    Args:
        owner: what it belongs to: an object, whose class is named, or its name, such as ``Phase 'FedAvg'``.
        argument: its name.
        value: its value.
        allowed: what it must be, such as ``at least 1`` or ``left out``.
        because: why, as far as that is not obvious.

    Attributes:
        owner: the owner's name.
        argument: the argument's name.
        value: the value, as the text shows it.
        allowed: as given.
        because: as given.

    Example:
        >>> print(InvalidArgumentError("Phase 'FedAvg'", "rounds", 0, "at least 1"))
        Phase 'FedAvg': rounds is 0, but must be at least 1.
        >>> print(InvalidArgumentError("Dirichlet", "alpha", "high", "a number", "it is a concentration"))
        Dirichlet: alpha is 'high', but must be a number, because it is a concentration.
    """

    def __init__(self, owner: object, argument: str, value: Any, allowed: str, because: str = "") -> None:
        self.owner = owner if isinstance(owner, str) else type(owner).__name__
        self.argument = argument
        self.value = value if isinstance(value, Shown) else shown(value)
        self.allowed = allowed
        self.because = because
        # all of them texts, so that a worker process can send the exception
        super().__init__(self.owner, argument, Shown(self.value), allowed, because)

    def __str__(self) -> str:
        """The sentence."""
        return self.sentence(f"{self.owner}: {self.argument}")

    def sentence(self, subject: str) -> str:
        """The sentence about another subject than owner and argument, such as the argument's key in a configuration."""
        reason = f", because {self.because}" if self.because else ""
        return f"{subject} is {self.value}, but must be {self.allowed}{reason}."


class Shown(str):
    """A value as a text shows it, or words in place of one, such as ``missing``."""

    __slots__ = ()


@contextmanager
def naming(owner: object) -> Iterator[None]:
    """In this context, refusals name another owner first, such as the phase that a model or an algorithm belongs to."""
    try:
        yield
    except InvalidArgumentError as error:
        if error.owner == str(owner):
            raise
        owners, value = f"{owner}: {error.owner}", Shown(error.value)
        raise type(error)(owners, error.argument, value, error.allowed, error.because) from error
    except MisconfigurationException as error:
        raise MisconfigurationException(f"{owner}: {error}") from error


@contextmanager
def tried(what: str) -> Iterator[None]:
    """In this context, something of the user's is tried: an exception of torch or Lightning ends a sentence."""
    try:
        yield
    except InvalidArgumentError:
        raise
    except Exception as error:  # whatever is raised there
        raise MisconfigurationException(f"{what}: {reason_of(error)}.") from error


def reason_of(error: Exception) -> str:
    """The first line of an exception's text without its last mark, or its class, as part of a sentence."""
    return next(iter(str(error).splitlines()), type(error).__name__).rstrip(".!")


def shown(value: Any) -> str:
    """A value as messages show it: numbers and texts themselves, cut if they are long, of another object what it is.

    Example:
        >>> shown("a"), shown(None), shown([1]), shown(Exception), shown(Exception())
        ("'a'", 'None', '[1]', 'the class Exception', 'an Exception')
        >>> len(shown([0] * 1000))
        304
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    plain_kinds = (str, bool, int, float, list, tuple, dict, set, Path, np.generic, type(None))
    if not isinstance(value, plain_kinds):
        return with_article(type(value).__name__)
    text = repr(plain(value))
    return text if len(text) <= _LONGEST_VALUE else f"{' '.join(text[:_LONGEST_VALUE].split())} ..."


def with_article(kind: str) -> str:
    """The name of a class with its article.

    Example:
        >>> with_article("AdapterMoE"), with_article("LocalOnly")
        ('an AdapterMoE', 'a LocalOnly')
    """
    return f"{'an' if kind[0] in 'AEIO' else 'a'} {kind}"


def check_at_least(owner: object, name: str, value: Any, lowest: int, highest: int | None = MOST_COUNTED) -> None:
    """Refuses what is not an integer, and one that is too low or, unless ``highest`` is None, too high; None passes."""
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if value is None or (is_integer and value >= lowest and (highest is None or value <= highest)):
        return
    range_in_words = f"of at least {lowest}" if highest is None else f"from {lowest} to {highest:,}"
    raise InvalidArgumentError(owner, name, value, f"an integer {range_in_words}")


def check_number(
    owner: object,
    name: str,
    value: Any,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
    allowed: str = "",
) -> None:
    """Refuses what is not a finite number in a range; None passes. ``allowed`` replaces the range in words."""
    if value is None:
        return
    ends = {"of at least": least, "above": above, "at most": most, "below": below}
    words = " and ".join(f"{end} {number}" for end, number in ends.items() if number is not None)
    too_low = is_finite(value) and ((least is not None and value < least) or (above is not None and value <= above))
    too_high = is_finite(value) and ((most is not None and value > most) or (below is not None and value >= below))
    if not is_finite(value) or too_low or too_high:
        raise InvalidArgumentError(owner, name, value, allowed or f"a finite number {words}")


def check_choice(owner: object, name: str, value: Any, choices: tuple[str, ...]) -> None:
    """Refuses a word that is not among the choices."""
    if value not in choices:
        raise InvalidArgumentError(owner, name, value, f"one of {', '.join(choices)}")


def check_kind(owner: object, name: str, value: Any, kind: type, hint: str = "") -> None:
    """Refuses an object of another kind, and a class in place of an object, and gives a ``hint``; None passes."""
    if value is not None and not isinstance(value, kind):
        raise InvalidArgumentError(owner, name, value, f"{with_article(kind.__name__)}{hint}")
    check_made(owner, name, value)


def check_made(owner: object, name: str, value: Any) -> None:
    """Refuses an object of a user's class whose constructor has not called that of the package's class, or PyTorch's.

    A class of the package keeps at least one of its constructor's arguments as an attribute of the same name, unless it
    is a module.
    """
    for base in type(value).__mro__:
        attributes = {"_modules"} if base is nn.Module else set[str]()
        if base.__module__.startswith("fedmoe_pl.") and "__init__" in vars(base) and not issubclass(base, nn.Module):
            _, *arguments = signature(vars(base)["__init__"]).parameters.values()
            attributes |= {each.name for each in arguments if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)}
        attributes -= {name for name in attributes if hasattr(type(value), name)}  # a subclass's property
        if attributes and not attributes & vars(value).keys():
            because = f"{base.__name__} sets its attributes there"
            raise InvalidArgumentError(owner, name, value, "one whose __init__ calls super().__init__()", because)


def is_finite(value: Any) -> bool:
    """Whether a value is a number other than nan and infinity."""
    is_number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    return is_number and (isinstance(value, int) or math.isfinite(value))


def plain(value: Any) -> Any:
    """A number of NumPy as one of Python; any other value unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def is_file_name(name: str) -> bool:
    r"""Whether a file or folder can have this name, and no other place is meant by it.

    Example:
        >>> [is_file_name(name) for name in ("FedAvg", "PFL MFE", "..", "a/b", "a\0b", "a" * 300, "")]
        [True, True, False, False, False, False, False]
    """
    if not name.isprintable() or name in ("", ".", "..") or name != name.strip():
        return False
    return not {"/", "\\"} & {*name} and len(name.encode()) <= _LONGEST_NAME


def is_path_below(path: str) -> bool:
    """Whether the path stays below the folder that it is relative to.

    Example:
        >>> [is_path_below(path) for path in ("quickstart", "digits/quickstart", "../x", "/tmp/x", "a//b", "")]
        [True, True, False, False, False, False]
    """
    return all(is_file_name(part) for part in path.split("/"))
