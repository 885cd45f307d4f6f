"""Files that are written whole or not at all, and whose damage is noticed: JSON, and tensors as safetensors."""

from __future__ import annotations

import json
import os
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from safetensors import SafetensorError
from safetensors.torch import load as tensors_of
from safetensors.torch import save as bytes_of

from fedmoe_pl.trees import Tree

_SEAL = re.compile(rb'"crc32":"([0-9a-f]{8})"')
_BLANK = {"crc32": "00000000"}


class DamagedFileError(Exception):
    """A file is not as it was written, or not one of this package's."""


def needed(path: Path) -> DamagedFileError:
    """The exception for a file without which a checkpoint cannot be read; its text follows the checkpoint's path."""
    return DamagedFileError(
        f"which needs '{path}', but that is missing, damaged or another's; a checkpoint must stay in its run's folder"
    )


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


def cannot_be_made(folder: Path, error: Exception) -> MisconfigurationException:
    """The exception for a folder of runs that cannot be made."""
    reason = getattr(error, "strerror", error)
    return MisconfigurationException(
        f"Federation: default_root_dir must be a folder in which '{folder}' can be made ({reason})."
    )


def read_sealed(path: Path) -> bytes:
    """The content of a file, if it is as it was written."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedFileError(f"'{path}' cannot be read: {error.strerror}.") from error
    seal = _SEAL.search(data)
    if seal is None:
        raise DamagedFileError(f"'{path}' has no checksum.")
    checksum = zlib.crc32(_BLANK["crc32"].encode(), zlib.crc32(data[: seal.start(1)]))
    if zlib.crc32(memoryview(data)[seal.end(1) :], checksum) != int(seal[1], 16):
        raise DamagedFileError(f"'{path}' is not as it was written.")
    return data


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes plain values as JSON, with a checksum of the whole file; floats keep all their digits, also nan."""
    _write(path, json.dumps({**_BLANK, **content}, separators=(",", ":")).encode())


def write_tensors(path: Path, tensors: Tree, **owner: object) -> None:
    """Writes :func:`plain` tensors as safetensors; the metadata has a checksum of the file, and says whose they are.

    A checksum notices accidents, such as a flipped bit; whoever can change the file can also write another checksum.
    """
    whose = {name: str(value) for name, value in owner.items()}
    _write(path, bytes_of(tensors, {**_BLANK, **whose}))


def read_tensors(path: Path, **owner: object) -> Tree:
    """Reads what :func:`write_tensors` wrote for the same owner."""
    data = read_sealed(path)
    try:
        metadata = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
        if any(metadata.get(name) != str(value) for name, value in owner.items()):
            raise DamagedFileError(f"'{path}' has the tensors of another owner.")
        return tensors_of(data)
    except (SafetensorError, ValueError, KeyError) as error:  # sealed by somebody else
        raise DamagedFileError(f"'{path}' has no tensors.") from error


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor alone in its memory: a view would be written with, or refused for, what it belongs to."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _write(path: Path, data: bytes) -> None:
    seal = _SEAL.search(data)
    assert seal is not None, "the first key of both formats"
    with path.open("wb") as file:
        for part in (data[: seal.start(1)], b"%08x" % zlib.crc32(data), memoryview(data)[seal.end(1) :]):
            file.write(part)
