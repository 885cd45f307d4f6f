"""Files that are written whole or not at all, and files of tensors whose damage is noticed."""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

_SEAL = b"fedmoe_pl crc32 "
_SEAL_SIZE = len(_SEAL) + 8
_CHUNK = 2**20


class DamagedFileError(Exception):
    """A file is not as it was written, or not one of this package's."""


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Gives a temporary file to write to, which then replaces ``path``; a kill at any moment leaves a whole file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # a kill may have left it as another name of a checkpoint, which writing to it would change
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        yield temporary
        os.replace(temporary, path)
        with suppress(FileNotFoundError):
            os.unlink(temporary)  # it stays if it was another name of the same file
    except Exception as error:
        with suppress(OSError):
            temporary.unlink()  # a full disk needs the space
        if isinstance(error, OSError):
            raise unwritable(path, error) from error
        raise


def unwritable(path: Path, error: OSError) -> MisconfigurationException:
    """The exception for a file that cannot be written."""
    return MisconfigurationException(f"'{path}' cannot be written: {error.strerror or error}.")


def cannot_be_made(folder: Path, error: OSError) -> MisconfigurationException:
    """The exception for a folder of runs that cannot be made."""
    return MisconfigurationException(
        f"Federation: default_root_dir must be a folder in which '{folder}' can be made ({error.strerror})."
    )


def save(content: Any, path: Path) -> None:
    """Writes tensors and plain values as ``torch.save`` does, with a checksum of the whole file as its last bytes.

    ``torch.load`` and zip tools read the file as any other: the checksum is the comment of the zip archive. It notices
    accidents, such as a flipped bit; whoever can change the file can also write another checksum.
    """
    with _Checksummed(io.FileIO(path, "w")) as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # on a full disk, PyTorch fails again when it ends the archive
                raise error.__context__ from None
            raise
        seal = _SEAL + b"%08x" % file.checksum
        file.seek(-2, os.SEEK_END)  # an archive without a comment ends with the comment's length, 0, in two bytes
        file.write(struct.pack("<H", len(seal)) + seal)


def load(path: Path) -> Any:
    """Reads what :func:`save` wrote."""
    if not is_sealed(path):
        raise DamagedFileError(f"'{path}' has no checksum.")
    return _load(path)


def load_any(path: Path) -> tuple[Any, bool]:
    """The same for files without this checksum, too, such as checkpoints of Lightning; and whether there is one.

    Without it, the checksums of the archive are verified.
    """
    if is_sealed(path):
        return _load(path), True
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise DamagedFileError(f"'{path}' has a damaged '{damaged}'.")
    except (OSError, RuntimeError, ValueError, zipfile.BadZipFile, NotImplementedError) as error:
        raise DamagedFileError(f"'{path}' cannot be read.") from error
    return _load(path), False


def _load(path: Path) -> Any:
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # of other bytes, torch.load may raise anything, such as a KeyError
        raise DamagedFileError(f"'{path}' cannot be read.") from error


def is_sealed(path: Path) -> bool:
    """Whether the file has the checksum that :func:`save` writes."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END) - _SEAL_SIZE
            file.seek(max(size, 0))
            seal = file.read()
            if size < 2 or not seal.startswith(_SEAL):
                return False
            file.seek(0)
            checksum, left = 0, size - 2
            while left:
                data = file.read(min(left, _CHUNK))
                checksum, left = zlib.crc32(data, checksum), left - len(data)
            length = file.read(2)
    except OSError as error:
        raise DamagedFileError(f"'{path}' cannot be read: {error.strerror}.") from error
    # torch.save wrote the length 0
    if seal != _SEAL + b"%08x" % zlib.crc32(b"\0\0", checksum) or length != struct.pack("<H", _SEAL_SIZE):
        raise DamagedFileError(f"'{path}' is not as it was written.")
    return True


class _Checksummed(io.BufferedWriter):
    """A file that knows the checksum of what was written to it."""

    checksum = 0

    def write(self, data: Any) -> int:
        self.checksum = zlib.crc32(data, self.checksum)
        return super().write(data)
