"""Names that become names of files and folders, and those of the rows of the table."""

from __future__ import annotations

from collections.abc import Sequence

from lightning.fabric.utilities.exceptions import MisconfigurationException

_LONGEST = 200  # bytes; a file's name has at most 255, and some have a suffix


def is_file_name(name: str) -> bool:
    r"""Whether a file or folder can have this name, and no other place is meant by it.

    Example:
        >>> [is_file_name(name) for name in ("FedAvg", "PFL MFE", "..", "a/b", "a\0b", "a" * 300, "")]
        [True, True, False, False, False, False, False]
    """
    if not name.isprintable() or name in ("", ".", "..") or name != name.strip():
        return False
    return not {"/", "\\"} & {*name} and len(name.encode()) <= _LONGEST


def is_path_below(path: str) -> bool:
    """Whether the path stays below the folder that it is relative to.

    Example:
        >>> [is_path_below(path) for path in ("quickstart", "digits/quickstart", "../x", "/tmp/x", "a//b", "")]
        [True, True, False, False, False, False]
    """
    return all(is_file_name(part) for part in path.split("/"))


def check_row(method: str, methods: Sequence[str], client: int, num_clients: int) -> None:
    """Refuses what is no row of the table, or no client.

    Args:
        method: the row.
        methods: the rows that there are.
        client: the client's id.
        num_clients: number of clients.

    Raises:
        MisconfigurationException: if there is no such method or client.
    """
    if method not in methods:
        raise MisconfigurationException(
            f"Federation: method is '{method}', but must be one that has begun: "
            f"{', '.join(methods) or 'there is none yet'}."
        )
    if client not in range(num_clients):
        raise MisconfigurationException(f"Federation: client is {client}, but must be from 0 to {num_clients - 1}.")
