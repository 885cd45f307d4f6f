"""Files that are written completely or not at all, and whose damage is detected; each tensor is written once."""

from __future__ import annotations

import errno
import json
import math
import os
import re
import shutil
import zlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from weakref import ref

import numpy as np
import torch
from filelock import BaseFileLock, FileLock, SoftFileLock, Timeout
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from fedmoe_pl.trees import Tree, bits_of, same_bits, version_of

_SEAL = re.compile(rb'"crc32":"([0-9a-f]{8})"')
_BLANK = {"crc32": "00000000"}
_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16"},
}  # the names that safetensors uses
_TYPES = {name: dtype for dtype, name in _DTYPES.items()}


class DamagedFileError(Exception):
    """A file was changed since it was written, or this package did not write it."""


def missing_file(path: Path) -> DamagedFileError:
    """The exception for a file that a checkpoint cannot do without; its message follows the checkpoint's path."""
    return DamagedFileError(
        f"which needs '{path}', but that is missing, damaged or another's; a checkpoint must stay in its run's folder"
    )


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yields a temporary file, which replaces ``path`` in the end; a kill at any moment leaves an intact file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # a kill may have left it as a hard link to a checkpoint, which writing to it would change
        with suppress(FileNotFoundError):
            os.unlink(temporary)
        yield temporary
        os.replace(temporary, path)
        with suppress(FileNotFoundError):
            os.unlink(temporary)  # `replace` does nothing if both are hard links to the same file
    except Exception as error:
        with suppress(OSError):
            temporary.unlink()  # the disk may be full
        if isinstance(error, OSError):
            raise unwritable(path, error) from error
        raise


@contextmanager
def replacing_files(folder: Path) -> Iterator[Path]:
    """Yields a temporary folder, which becomes ``folder`` in the end; a kill does not leave half of it.

    If the folder exists, each new file replaces the one of the same name at once, and its other files stay.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # left by a kill
        temporary.mkdir(parents=True)
        yield temporary
        if folder.exists():
            for path in temporary.iterdir():
                os.replace(path, folder / path.name)
            temporary.rmdir()
        else:
            os.replace(temporary, folder)
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise unwritable(folder, error) from error
        raise


def unwritable(path: Path, error: OSError) -> MisconfigurationException:
    """The exception for a file that cannot be written."""
    return MisconfigurationException(f"'{path}' cannot be written: {error.strerror or error}.")


def cannot_be_made(folder: Path, error: Exception) -> MisconfigurationException:
    """The exception for a run's folder that cannot be made."""
    reason = getattr(error, "strerror", error)
    return MisconfigurationException(
        f"Federation: default_root_dir must be a folder in which '{folder}' can be made ({reason})."
    )


def read_sealed(path: Path) -> bytes:
    """The content of a file; refuses a file whose checksum is wrong."""
    _check_ordinary(path)
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


def _check_ordinary(path: Path) -> None:
    """Refuses what is not a regular file, such as a pipe, from which reading would hang."""
    if path.exists() and not path.is_file():
        raise DamagedFileError(f"'{path}' is no ordinary file.")


def write_file(path: Path, content: str | bytes) -> None:
    """Writes bytes, or a text in UTF-8."""
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def write_json(path: Path, content: dict[str, Any], before_replacing: Callable[[], object] = lambda: None) -> None:
    """Writes plain values as JSON, with a checksum of the whole file; floats keep all digits; NaN is allowed."""
    _write(path, json.dumps({**_BLANK, **content}, separators=(",", ":")).encode(), before_replacing=before_replacing)


def read_json(path: Path) -> dict[str, Any]:
    """Reads what :func:`write_json` wrote."""
    data = read_sealed(path)
    try:
        content = json.loads(data)
        del content["crc32"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # RecursionError if nested too deeply
        raise DamagedFileError(f"'{path}' is not as it was written.") from error
    return content


def write_tensors(path: Path, tensors: Tree, **owner: object) -> None:
    """Writes tensors as safetensors; the metadata contain a checksum of the file and the tensors' owner.

    Tensors are written directly from memory, while the library's functions would hold two copies of all of them. The
    checksum detects accidents, such as a flipped bit, but not an attacker, who could also replace the checksum.
    """
    whose = {name: str(value) for name, value in owner.items()}
    header, offset = dict[str, Any]({"__metadata__": {**_BLANK, **whose}}), 0
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)  # aligns every tensor in the file
    for name, tensor in ordered:
        if tensor.dtype not in _DTYPES:
            raise MisconfigurationException(f"'{path}' cannot be written: no file has {tensor.dtype}, as '{name}' is.")
        places = [offset, offset := offset + tensor.nbytes]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": places}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    _write(path, len(text).to_bytes(8, "little") + text, (bits_of(tensor).numpy() for _, tensor in ordered))


def read_tensors(path: Path, **owner: object) -> Tree:
    """Reads what :func:`write_tensors` wrote for the same owner, each tensor into its own memory."""
    tensors, damaged = Tree(), DamagedFileError(f"'{path}' is not as it was written.")
    _check_ordinary(path)
    try:
        with path.open("rb") as file:
            head, header = _head(file)
            metadata, checksum = header.pop("__metadata__"), zlib.crc32(_SEAL.sub(b'"crc32":"00000000"', head, count=1))
            sizes = [math.prod(each["shape"]) * _TYPES[each["dtype"]].itemsize for each in header.values()]
            if len(head) + sum(sizes) != path.stat().st_size:
                raise damaged
            for name, each in header.items():
                tensors[name] = torch.empty(each["shape"], dtype=_TYPES[each["dtype"]])
                values = bits_of(tensors[name]).numpy().data
                file.readinto(values)
                checksum = zlib.crc32(values, checksum)
        if metadata["crc32"] != f"{checksum:08x}":
            raise damaged
    except OSError as error:
        raise DamagedFileError(f"'{path}' cannot be read: {error.strerror}.") from error
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:  # the bytes make no sense
        raise damaged from error
    if any(metadata.get(name) != str(value) for name, value in owner.items()):
        raise DamagedFileError(f"'{path}' has the tensors of another owner.")
    return tensors


def header_of(path: Path) -> dict[str, Any]:
    """The header of a file of tensors, without checking the file for damage; empty if it cannot be read."""
    with suppress(DamagedFileError, OSError, ValueError, TypeError, RecursionError):
        _check_ordinary(path)
        with path.open("rb") as file:
            return dict(_head(file)[1])
    return {}


def _head(file: BinaryIO) -> tuple[bytes, dict[str, Any]]:
    """The header of a file of tensors: its bytes, and the place, type and shape of each tensor."""
    size = file.read(8)
    text = file.read(min(int.from_bytes(size, "little"), os.fstat(file.fileno()).st_size))
    return size + text, json.loads(text)


def in_own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory of its own: copied if it is a view, which would keep a larger tensor alive."""
    tensor = tensor.detach().cpu()
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _write(
    path: Path, head: bytes, arrays: Iterable[np.ndarray] = (), before_replacing: Callable[[], object] = lambda: None
) -> None:
    """Writes bytes and arrays of bytes, and their checksum over the zeros that the head has in its place."""
    seal = _SEAL.search(head)
    assert seal is not None, "the first key of both formats"
    checksum = zlib.crc32(head)
    with replacing(path) as temporary:
        with temporary.open("wb") as file:
            file.write(head)
            for array in arrays:
                for start in range(0, len(array), _AT_ONCE):
                    part = array[start : start + _AT_ONCE].data
                    checksum = zlib.crc32(part, checksum)
                    file.write(part)
            file.seek(seal.start(1))
            file.write(b"%08x" % checksum)
        before_replacing()


_AT_ONCE = 2**20  # bytes; larger writes can take ten times as long, because Linux looks for contiguous memory
_COMPARED = 16  # number of first elements, which distinguish most tensors
_TOLERATED = 2**16  # unused bytes of a file that do not justify rewriting its used ones


class Place(NamedTuple):
    """Where a tensor is stored: the number of the file, and the tensor's name in it."""

    file: int
    name: str


class TensorFiles:
    """Tensors in numbered files; for unchanged tensors, a checkpoint refers to the files of earlier checkpoints.

    Args:
        folder: the folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[Any, list[tuple[Tensor, int, Place]]] = defaultdict(list)  # each with its written version
        self._same: dict[int, tuple[ref[Tensor], int, Place]] = {}  # tensors equal to a known one, by id
        self._read: dict[int, Tree] = {}

    def write(self, content: Any, staying: Collection[int]) -> tuple[Any, set[int]]:
        """Writes new tensors to a new file; returns the content with places instead of tensors, and the places' files.

        If less than half of an old file would be used, that part is rewritten, unless the file is one of ``staying``.
        """
        self._read.clear()
        named: dict[str, Tensor] = {}
        replaced(content, named.__setitem__)
        places = {key: place for key, tensor in named.items() if (place := self._place(tensor)) is not None}
        used = Counter[int]()
        for place, key in {place: key for key, place in places.items()}.items():
            used[place.file] += named[key].nbytes
        sizes = {file: self._path(file).stat().st_size for file in used if file not in staying}
        wasted = {file for file, size in sizes.items() if size > 2 * used[file] + _TOLERATED}
        self._forget(lambda place: place.file in wasted)
        number, new = max(map(int, (path.stem for path in self._paths())), default=0) + 1, Tree()
        for key, tensor in named.items():
            if key in places and places[key].file not in wasted:
                continue
            place = self._place(tensor)
            if place is None:
                place, new[key] = Place(number, key), tensor
                self._known[_alike(tensor)].append((tensor, version_of(tensor), place))
            places[key] = place
        if new:
            write_tensors(self._path(number), new, number=number)
        return replaced(content, lambda key, _: places[key]._asdict()), {place.file for place in places.values()}

    def keep(self, used: Collection[int], others: Collection[int]) -> None:
        """Removes all files except ``used``, to which new checkpoints may refer, and ``others``."""
        self._forget(lambda place: place.file not in used)
        for path in self._paths():
            if int(path.stem) not in {*used, *others}:
                path.unlink()

    def read(self, item: dict[str, Any]) -> Any:
        """An ``object_hook`` of ``json.loads`` that replaces each place by its tensor; other objects stay."""
        if item.keys() != {*Place._fields} or not isinstance(item["file"], int):
            return item
        place = Place(**item)
        if place.file not in self._read:
            self._read[place.file] = self._read_file(place.file)
        tensor = self._read[place.file][place.name]
        if self._place(tensor) is None:
            self._known[_alike(tensor)].append((tensor, version_of(tensor), place))
        return tensor

    def _read_file(self, number: int) -> Tree:
        try:
            return read_tensors(self._path(number), number=number)
        except DamagedFileError as error:
            raise missing_file(self._path(number)) from error

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.safetensors"

    def _paths(self) -> list[Path]:
        return [path for path in self.folder.glob("*.safetensors") if path.stem.isdigit()]

    def _place(self, tensor: Tensor) -> Place | None:
        if id(tensor) in self._same:
            other, version, place = self._same[id(tensor)]
            if other() is tensor and version == version_of(tensor):
                return place
        for other, version, place in self._known[_alike(tensor)]:
            if version == version_of(other) and same_bits(other, tensor):
                self._same[id(tensor)] = ref(tensor), version_of(tensor), place
                return place
        return None

    def _forget(self, is_gone: Callable[[Place], bool]) -> None:
        for alike, known in [*self._known.items()]:
            self._known[alike] = [each for each in known if not is_gone(each[-1])]
            if not self._known[alike]:  # otherwise, new values in every round would make the dict grow without end
                del self._known[alike]
        same = self._same.items()
        self._same = {key: each for key, each in same if each[0]() is not None and not is_gone(each[-1])}


def replaced(content: Any, change: Callable[[str, Tensor], Any], key: str = "") -> Any:
    """The content with each tensor replaced by ``change(key, tensor)``, where a key is like ``models/initial/bias``."""
    if isinstance(content, Tensor):
        return change(key, content)
    if isinstance(content, dict):
        return {name: replaced(item, change, f"{key}/{name}" if key else name) for name, item in content.items()}
    if isinstance(content, list | tuple):
        return [replaced(item, change, f"{key}/{index}") for index, item in enumerate(content)]
    return content


def _alike(tensor: Tensor) -> tuple[object, ...]:
    """A key that tensors with the same bits have in common."""
    return tensor.dtype, tensor.shape, bits_of(tensor.detach().reshape(-1)[:_COMPARED]).numpy().tobytes()


def acquired(path: Path, timeout: float = 0) -> BaseFileLock:
    """Acquires a lock for this process; if the file system has no locks, a file whose existence is the lock."""
    try:
        lock = FileLock(path)
        lock.acquire(timeout)
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        lock = SoftFileLock(path.with_name(f"{path.name}_file"))
        rank_zero_warn(
            f"The file system of '{path.parent}' has no locks ({error.strerror}). In their place, the file "
            f"'{lock.lock_file}' keeps other processes out; if one was killed, remove it."
        )
        lock.acquire(timeout)
    return lock


@contextmanager
def exclusive(path: Path, taken: str, unusable: Callable[[OSError], Exception]) -> Iterator[None]:
    """In this context, this process holds a lock, which other processes cannot get.

    The kernel releases the lock when the process ends, even if it is killed. Worker processes do not inherit it.
    """
    try:
        lock = acquired(path)
    except Timeout as error:
        raise MisconfigurationException(taken) from error
    except OSError as error:
        raise unusable(error) from error
    try:
        yield
    finally:
        lock.release()
