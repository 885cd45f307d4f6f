"""Checks of arguments of data modules, partitioners and augmentations."""

from __future__ import annotations

import math

from lightning.fabric.utilities.exceptions import MisconfigurationException


def check_at_least(owner: object, name: str, value: int | None, lowest: int) -> None:
    """Refuses an integer that is too low; None passes.

    Args:
        owner: the object that the argument belongs to; the message names its class.
        name: name of the argument.
        value: its value.
        lowest: the lowest value that is allowed.

    Raises:
        MisconfigurationException: if the value is below ``lowest``.
    """
    if value is not None and value < lowest:
        raise MisconfigurationException(
            f"{type(owner).__name__}: {name} is {value}, but must be an integer of at least {lowest}."
        )


def check_concentration(owner: object, name: str, value: float) -> None:
    """Refuses a concentration of a Dirichlet distribution that is not a finite number above 0.

    Args:
        owner: the object that the argument belongs to; the message names its class.
        name: name of the argument.
        value: its value.

    Raises:
        MisconfigurationException: if it is another number.
    """
    if not 0 < value < math.inf:
        raise MisconfigurationException(
            f"{type(owner).__name__}: {name} is {value}, but must be a finite number above 0."
        )


def check_choice(owner: object, name: str, value: str, choices: tuple[str, ...]) -> None:
    """Refuses a word that is not among the choices.

    Args:
        owner: the object that the argument belongs to; the message names its class.
        name: name of the argument.
        value: its value.
        choices: the words that are allowed.

    Raises:
        MisconfigurationException: if it is another word.
    """
    if value not in choices:
        raise MisconfigurationException(
            f"{type(owner).__name__}: {name} is '{value}', but must be one of {', '.join(choices)}."
        )
