"""Files that are written whole or not at all, and whose damage is noticed; each tensor is written once."""

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

from fedmoe_pl.trees import Tree, bits_of, same_bits

_SEAL = re.compile(rb'"crc32":"([0-9a-f]{8})"')
_BLANK = {"crc32": "00000000"}
_DTYPES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.bool: "BOOL", torch.complex64: "C64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2"},
    **{torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16"},
}  # as safetensors names them
_TYPES = {name: dtype for dtype, name in _DTYPES.items()}


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


@contextmanager
def replacing_files(folder: Path) -> Iterator[Path]:
    """Gives a temporary folder to write files to, which then becomes ``folder``; a kill leaves no half of it.

    If the folder exists, the new files replace those of the same names, each of them whole, and its other files stay.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)  # what a kill has left
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
    """The exception for a folder of runs that cannot be made."""
    reason = getattr(error, "strerror", error)
    return MisconfigurationException(
        f"Federation: default_root_dir must be a folder in which '{folder}' can be made ({reason})."
    )


def read_sealed(path: Path) -> bytes:
    """The content of a file, if it is as it was written."""
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
    """Refuses what is no file, such as a pipe, for which reading would wait."""
    if path.exists() and not path.is_file():
        raise DamagedFileError(f"'{path}' is no ordinary file.")


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes plain values as JSON, with a checksum of the whole file; floats keep all their digits, also nan."""
    _write(path, json.dumps({**_BLANK, **content}, separators=(",", ":")).encode())


def read_json(path: Path) -> dict[str, Any]:
    """Reads what :func:`write_json` wrote."""
    data = read_sealed(path)
    try:
        content = json.loads(data)
        del content["crc32"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:  # the last of one that is too deep
        raise DamagedFileError(f"'{path}' is not as it was written.") from error
    return content


def write_tensors(path: Path, tensors: Tree, **owner: object) -> None:
    """Writes tensors as safetensors; the metadata has a checksum of the file, and says whose they are.

    They are written from where they are: the library's own functions hold two copies of all of them meanwhile. A
    checksum notices accidents, such as a flipped bit; whoever can change the file can also write another checksum.
    """
    whose = {name: str(value) for name, value in owner.items()}
    header, offset = dict[str, Any]({"__metadata__": {**_BLANK, **whose}}), 0
    ordered = sorted(tensors.items(), key=lambda item: -item[1].itemsize)  # so that each is aligned in the file
    for name, tensor in ordered:
        if tensor.dtype not in _DTYPES:
            raise MisconfigurationException(f"'{path}' cannot be written: no file has {tensor.dtype}, as '{name}' is.")
        places = [offset, offset := offset + tensor.nbytes]
        header[name] = {"dtype": _DTYPES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": places}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    _write(path, len(text).to_bytes(8, "little") + text, (bits_of(tensor).numpy() for _, tensor in ordered))


def read_tensors(path: Path, **owner: object) -> Tree:
    """Reads what :func:`write_tensors` wrote for the same owner, each tensor into memory of its own."""
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
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError) as error:  # of other bytes
        raise damaged from error
    if any(metadata.get(name) != str(value) for name, value in owner.items()):
        raise DamagedFileError(f"'{path}' has the tensors of another owner.")
    return tensors


def names_in(path: Path) -> Collection[str]:
    """The names of the tensors in a file, of which damage is not noticed; none if it cannot be read."""
    with suppress(DamagedFileError, OSError, ValueError, AttributeError, RecursionError):
        _check_ordinary(path)
        with path.open("rb") as file:
            return _head(file)[1].keys() - {"__metadata__"}
    return ()


def _head(file: BinaryIO) -> tuple[bytes, dict[str, Any]]:
    """The head of a file of tensors, and what it says of each: the place, type and shape."""
    size = file.read(8)
    text = file.read(min(int.from_bytes(size, "little"), os.fstat(file.fileno()).st_size))
    return size + text, json.loads(text)


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor alone in its memory, copied if it is a view, which would keep alive what it belongs to."""
    tensor = tensor.detach().cpu()
    if tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _write(path: Path, head: bytes, arrays: Iterable[np.ndarray] = ()) -> None:
    """Writes bytes and arrays of bytes, and the checksum of all of them where the first has zeros in its place."""
    seal = _SEAL.search(head)
    assert seal is not None, "the first key of both formats"
    checksum = zlib.crc32(head)
    with path.open("wb") as file:
        file.write(head)
        for array in arrays:
            for start in range(0, len(array), _AT_ONCE):
                part = array[start : start + _AT_ONCE].data
                checksum = zlib.crc32(part, checksum)
                file.write(part)
        file.seek(seal.start(1))
        file.write(b"%08x" % checksum)


_AT_ONCE = 2**20  # bytes; for more, Linux looks for so much connected memory that writing can take ten times as long
_COMPARED = 16  # elements that tell most tensors apart
_TOLERATED = 2**16  # bytes of a file that are not worth writing its other ones again


class Place(NamedTuple):
    """Where a tensor is: the number of the file, and its name in it."""

    file: int
    name: str


class TensorFiles:
    """Tensors in numbered files; a checkpoint refers to the files of earlier ones for what did not change.

    Args:
        folder: the folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._known: dict[Any, list[tuple[Tensor, int, Place]]] = defaultdict(list)  # with the version that was written
        self._same: dict[int, tuple[ref[Tensor], int, Place]] = {}  # equal to a known one, by id
        self._read: dict[int, Tree] = {}

    def write(self, content: Any, staying: Collection[int]) -> tuple[Any, set[int]]:
        """The content with places for tensors, and their files; what none of these has is written to a new one.

        If less than half of a file would be used, that is written again, unless the file is one of those that stay.
        """
        self._read.clear()
        named: dict[str, Tensor] = {}
        replaced(content, named.__setitem__)
        places = {key: place for key, tensor in named.items() if (place := self._place(tensor)) is not None}
        used = Counter[int]()
        for place, key in {place: key for key, place in places.items()}.items():
            used[place.file] += named[key].nbytes
        wasted = {file for file, size in used.items() if file not in staying and self._is_wasted(file, size)}
        self._forget(lambda place: place.file in wasted)
        number, new = max(map(int, (path.stem for path in self._paths())), default=0) + 1, Tree()
        for key, tensor in named.items():
            if key in places and places[key].file not in wasted:
                continue
            place = self._place(tensor)
            if place is None:
                place, new[key] = Place(number, key), tensor
                self._known[_alike(tensor)].append((tensor, _version(tensor), place))
            places[key] = place
        if new:
            with replacing(self._path(number)) as temporary:
                write_tensors(temporary, new, number=number)
        return replaced(content, lambda key, _: places[key]._asdict()), {place.file for place in places.values()}

    def keep(self, used: Collection[int], others: Collection[int]) -> None:
        """Removes all files but the used ones, to which new checkpoints may refer, and these others."""
        self._forget(lambda place: place.file not in used)
        for path in self._paths():
            if int(path.stem) not in {*used, *others}:
                path.unlink()

    def read(self, item: dict[str, Any]) -> Any:
        """The tensor in a place, as ``json.loads`` meets it; other values stay."""
        if item.keys() != {*Place._fields} or not isinstance(item["file"], int):
            return item
        place = Place(**item)
        if place.file not in self._read:
            self._read[place.file] = self._read_file(place.file)
        tensor = self._read[place.file][place.name]
        if self._place(tensor) is None:
            self._known[_alike(tensor)].append((tensor, _version(tensor), place))
        return tensor

    def _read_file(self, number: int) -> Tree:
        try:
            return read_tensors(self._path(number), number=number)
        except DamagedFileError as error:
            raise needed(self._path(number)) from error

    def _path(self, number: int) -> Path:
        return self.folder / f"{number}.safetensors"

    def _paths(self) -> list[Path]:
        return [path for path in self.folder.glob("*.safetensors") if path.stem.isdigit()]

    def _is_wasted(self, number: int, used: int) -> bool:
        return self._path(number).stat().st_size > 2 * used + _TOLERATED

    def _place(self, tensor: Tensor) -> Place | None:
        if id(tensor) in self._same:
            other, version, place = self._same[id(tensor)]
            if other() is tensor and version == _version(tensor):
                return place
        for other, version, place in self._known[_alike(tensor)]:
            if version == _version(other) and same_bits(other, tensor):
                self._same[id(tensor)] = ref(tensor), _version(tensor), place
                return place
        return None

    def _forget(self, is_gone: Callable[[Place], bool]) -> None:
        for alike, known in [*self._known.items()]:
            self._known[alike] = [each for each in known if not is_gone(each[-1])]
            if not self._known[alike]:  # new values every round would make it ever larger
                del self._known[alike]
        same = self._same.items()
        self._same = {key: each for key, each in same if each[0]() is not None and not is_gone(each[-1])}


def replaced(content: Any, change: Callable[[str, Tensor], Any], key: str = "") -> Any:
    """The content with something else in place of each tensor, which has a key such as ``models/initial/bias``."""
    if isinstance(content, Tensor):
        return change(key, content)
    if isinstance(content, dict):
        return {name: replaced(item, change, f"{key}/{name}" if key else name) for name, item in content.items()}
    if isinstance(content, list | tuple):
        return [replaced(item, change, f"{key}/{index}") for index, item in enumerate(content)]
    return content


def _alike(tensor: Tensor) -> tuple[object, ...]:
    """What tensors of the same bits have in common."""
    return tensor.dtype, tensor.shape, bits_of(tensor.detach().reshape(-1)[:_COMPARED]).numpy().tobytes()


def _version(tensor: Tensor) -> int:
    """Counts the changes in place of a tensor; PyTorch does not count those of one made in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def acquired(path: Path, timeout: float = 0) -> BaseFileLock:
    """A lock, which this process holds now; where the file system has none, a file whose existence is the lock."""
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
    """Keeps other processes from a lock until this context ends.

    The kernel ends the lock with the process, also when it is killed. Worker processes do not have it.
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
