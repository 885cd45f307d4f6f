"""Classes that clients name: their numbers, which are the same at all clients, and names that seem misspelt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from itertools import pairwise
from unicodedata import normalize

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data.datamodule import FederatedDataModule

_CLOSE = 0.75  # how similar two names are of which one may be misspelt


def numbered_classes(owner: FederatedDataModule, names: Sequence[str], clients: Sequence[str]) -> Tensor:
    """The number of each sample's class, int64, shape (n,), given the names of its class and its client.

    Classes are numbered in the order of ``owner.classes``; if that is None, it becomes the names that any client has,
    sorted (integers by their size), and a warning tells which of them may be misspelt.

    Raises:
        MisconfigurationException: if a class is not among ``owner.classes``, or appears there twice.
    """
    names = _composed(names)
    holders: dict[str, dict[str, None]] = {}
    for name, client in zip(names, clients, strict=True):
        holders.setdefault(name, {})[client] = None
    if owner.classes is None:
        is_number = are_integers(holders)
        found = sorted(holders, key=int if is_number else None)
        for name, other in pairwise(found if is_number else ()):
            if int(name) == int(other):
                allowed = "given where one number is written in several ways"
                one, another = next(iter(holders[name])), next(iter(holders[other]))
                because = f"client {one} has '{name}' and {'' if one == another else f'client {another} '}'{other}'"
                raise InvalidArgumentError(owner, "classes", None, allowed, because)
        owner.classes = found
        _warn_of_misspelt(owner, holders)
    classes = owner.classes = _composed(owner.classes)
    if unknown := sorted({*holders} - {*classes}):
        because = f"{next(iter(holders[unknown[0]]))} has the class '{unknown[0]}'"
        raise InvalidArgumentError(owner, "classes", owner.classes, "the names of all classes", because)
    if twice := [name for name, number in Counter(classes).items() if number > 1]:
        because = f"'{twice[0]}' appears twice"
        raise InvalidArgumentError(owner, "classes", owner.classes, "the names of all classes, each once", because)
    number = {name: label for label, name in enumerate(classes)}
    return torch.tensor([number[name] for name in names], dtype=torch.int64)


def _composed(names: Sequence[str]) -> list[str]:
    """The names, with an umlaut as one character: archives of macOS have two."""
    return [normalize("NFC", name) for name in names]


def are_integers(names: Iterable[str]) -> bool:
    """Whether all names are integers."""
    return all(name.removeprefix("-").isdecimal() for name in names)


def _warn_of_misspelt(owner: FederatedDataModule, holders: dict[str, dict[str, None]]) -> None:
    """Warns of classes of a single client that lacks a class of others with nearly the same name."""
    folded = {name: " ".join(name.casefold().split()) for name in holders}
    for name, (client, *others) in holders.items():
        if others:
            continue
        common = {folded[other]: other for other in holders if len(holders[other]) > 1 and client not in holders[other]}
        if similar := get_close_matches(folded[name], [*common], 1, _CLOSE):
            rank_zero_warn(
                f"{type(owner).__name__}: only {client} has the class '{name}', and it lacks "
                f"'{common[similar[0]]}'; if it is misspelt, correct it, because it counts as a class of its own."
            )
