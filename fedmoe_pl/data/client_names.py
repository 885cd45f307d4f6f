"""What the clients are called."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn

from fedmoe_pl.checks import InvalidArgumentError, is_file_name

_SHOWN = 10  # names in a refusal
_LONGEST = 60  # characters of a name in a file's
_NOT_IN_FILES = re.compile(r"[^\w .()+@'-]")


class ClientNames(list[str]):
    """What the clients are called in tables and messages: their names in the data or, without any, their numbers.

    Example:
        >>> names = ClientNames(["Berlin", "St. Mary's / North"])
        >>> names[1], names.file(0), names.file(1), names.number("Federation", "Berlin")
        ("St. Mary's / North", 'Berlin', "St. Mary's _ North~1", 0)
        >>> numbers = ClientNames.numbers(12)
        >>> numbers[7], numbers.file(7), numbers.number("Federation", 7)
        ('7', 'client_007', 7)
    """

    @classmethod
    def numbers(cls, num_clients: int) -> ClientNames:
        """Clients without names."""
        return cls(map(str, range(num_clients)))

    @cached_property
    def given(self) -> bool:
        """Whether the data name the clients."""
        return any(name != str(client) for client, name in enumerate(self))

    @cached_property
    def _alike(self) -> dict[str, list[str]]:
        """Names that differ only in case or spaces at their ends, which some file systems take for the same."""
        alike = defaultdict[str, list[str]](list)
        for name in self:
            alike[name.strip().casefold()].append(name)
        return {key: names for key, names in alike.items() if len(names) > 1}

    def check(self, owner: object) -> None:
        """Refuses an empty name, and warns of names that are hardly different."""
        if wrong := [name for name in self if not isinstance(name, str)]:
            raise InvalidArgumentError(owner, "client_names", wrong[0], "a text; a list needs no names")
        if not all(map(str.strip, self)):
            empty = [name.strip() for name in self].index("")
            raise InvalidArgumentError(owner, "client_names", self[empty], "a name of at least one letter or digit")
        if self._alike:
            pairs = ["'" + "' and '".join(names) + "'" for names in self._alike.values()]
            more = f" and {len(pairs) - _SHOWN} more" if len(pairs) > _SHOWN else ""
            rank_zero_warn(
                f"{type(owner).__name__}: clients differ only in case or spaces, and are different clients: "
                f"{', '.join(pairs[:_SHOWN])}{more}."
            )

    def given_name(self, client: int) -> str:
        """The client's name; empty if the data name none."""
        return self[client] if self.given else ""

    def file(self, client: int) -> str:
        """The name of the client's files and of its tags, without suffix: ``client_003`` of a client without a name.

        What a file cannot be called is replaced; the client's number then keeps it apart from others.
        """
        name = self[client]
        if name == str(client):
            return f"client_{client:03d}"
        if is_file_name(name) and "~" not in name and name.casefold() not in self._alike:
            return name
        return f"{_NOT_IN_FILES.sub('_', name.strip())[:_LONGEST]}~{client}"

    def text(self, clients: list[int]) -> str:
        """Clients in a sentence, such as ``client 3`` or ``clients hospital_A, hospital_C``."""
        return f"client{'s' * (len(clients) > 1)} {', '.join(self[client] for client in clients)}"

    def number(self, owner: object, client: int | str) -> int:
        """The number of a client, given its name or its number.

        Raises:
            MisconfigurationException: if there is no such client.
        """
        if isinstance(client, str) and client in self:
            return self.index(client)
        number = int(client) if isinstance(client, str) and client.isdecimal() else client
        if number not in range(len(self)):
            allowed = f"from 0 to {len(self) - 1}"
            if self.given:
                shown = ", ".join(self[:_SHOWN]) + (", ..." if len(self) > _SHOWN else "")
                allowed = f"one of {shown}, or a number {allowed}"
            raise InvalidArgumentError(owner, "client", client, allowed)
        return int(number)


def are_integers(names: Iterable[str]) -> bool:
    """Whether all names are integers."""
    return all(name.removeprefix("-").isdecimal() for name in names)


def numbered_clients(ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The clients' ids in the order of their numbers, and the number of each sample's client, shape (n,).

    Ids are sorted; texts that are all integers, by their size.

    Example:
        >>> names, clients = numbered_clients(np.array(["10", "9", "10"]))
        >>> names.tolist(), clients.tolist()
        (['9', '10'], [1, 0, 1])
    """
    names, clients = np.unique(ids, return_inverse=True)
    if isinstance(names[0], str) and are_integers(names):
        order = np.array(sorted(range(len(names)), key=lambda place: int(names[place])))
        names, clients = names[order], np.argsort(order)[clients]
    return names, clients


def files_of_clients(owner: object, argument: str, folder: Path, ending: str) -> list[Path]:
    """The files of a folder, one for each client; hidden ones are none, and the ending may be in capitals."""
    files = sorted(each for each in folder.iterdir() if each.suffix.lower() == ending and each.name[0] != ".")
    for name, number in Counter(file.stem for file in files).items():
        if number > 1:
            because = f"'{name}' has {number}"
            raise InvalidArgumentError(owner, argument, str(folder), "a folder with one file for each client", because)
    return files
