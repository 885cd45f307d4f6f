"""The rows of ``rounds.csv`` beside a checkpoint: each is appended once, so that a round costs the same at any time."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedmoe_pl.checkpoints.writing import DamagedFileError, unwritable


@dataclass(frozen=True)
class SavedRows:
    """The rows in a file that belong to a checkpoint; after a kill, there may be others behind them.

    Attributes:
        count: how many they are.
        size: their bytes.
        checksum: the CRC-32 of these bytes.
    """

    count: int = 0
    size: int = 0
    checksum: int = 0


def append_rows(path: Path, rows: Sequence[dict[str, Any]], saved: SavedRows) -> SavedRows:
    """Appends the rows that are not in the file, one line of JSON each; rows of no checkpoint are overwritten."""
    new = rows[saved.count :]
    if not new:
        return saved
    lines = "".join(json.dumps(row) + "\n" for row in new).encode()  # floats with all their digits, also nan
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("r+b" if saved.size else "wb") as file:
            file.truncate(saved.size)
            file.seek(saved.size)
            file.write(lines)
    except OSError as error:
        raise unwritable(path, error) from error
    return SavedRows(len(rows), saved.size + len(lines), zlib.crc32(lines, saved.checksum))


def read_rows(path: Path, saved: SavedRows) -> list[dict[str, Any]]:
    """The rows that belong to a checkpoint."""
    data = b""
    if saved.size and path.is_file():
        with path.open("rb") as file:
            data = file.read(saved.size)
    if len(data) != saved.size or zlib.crc32(data) != saved.checksum:
        raise DamagedFileError(f"'{path}' is missing or damaged.")
    return [json.loads(line) for line in data.splitlines()]
