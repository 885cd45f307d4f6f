"""Tensors in files in memory, which copies of a module and other processes map, so that they are in memory once."""

from __future__ import annotations

import ctypes
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import IO, TypeVar
from weakref import WeakValueDictionary, finalize

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

Key = TypeVar("Key")
ALIGNMENT = 64  # bytes; that of PyTorch's own memory


class OpenFile:
    """A file that this process has opened; it is closed when nobody needs it any more."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        finalize(self, file.close)

    @property
    def path(self) -> str:
        """Where all processes of this machine find it, although it has no name."""
        return f"/proc/{os.getpid()}/fd/{self.file.fileno()}"


class MappedFile(np.ndarray):
    """The bytes of a file in the memory of this process, shared with all that map it.

    Writing to them does not change the file: the pages that are written to become a copy.
    """

    file: OpenFile

    @classmethod
    def of(cls, file: OpenFile) -> MappedFile:
        """Maps a file."""
        # Python's own mmap would keep another descriptor open for every mapping
        values = torch.from_file(file.path, False, os.fstat(file.file.fileno()).st_size, dtype=torch.uint8)
        mapped = values.numpy().view(cls)
        mapped.file = file
        _files[mapped.start] = mapped
        return mapped

    @property
    def start(self) -> int:
        """Its address."""
        return self.ctypes.data

    def storage(self, place: int, size: int) -> Tensor:
        """Some bytes, as a storage of their own."""
        return torch.frombuffer(self, dtype=torch.uint8, offset=place, count=size)


_files = WeakValueDictionary[int, MappedFile]()  # of this process, by address


def file_at(address: int, size: int) -> MappedFile | None:
    """The file that is mapped to this memory."""
    files = list(_files.items())
    return next((file for start, file in files if start <= address and address + size <= start + len(file)), None)


def is_mapped(tensor: Tensor) -> bool:
    """Whether a tensor is in a file in memory, so that it takes memory where it is written to."""
    return bool(_files) and storage_of(tensor) is not None and file_at(tensor.data_ptr(), tensor.nbytes) is not None


def map_tensors(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Copies of tensors that are plain memory, in a new file; there are none on other systems than Linux."""
    storages, places = _storages(tensors.values()), dict[int, int]()
    if sys.platform != "linux" or not storages:
        return {}
    file = os.fdopen(os.memfd_create("fedmoe_pl"), "w+b")
    for address, values in storages.items():
        places[address] = file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR)
        file.write(values.numpy().data)
    file.flush()
    mapped = MappedFile.of(OpenFile(file))
    return _moved(tensors, {address: mapped.storage(places[address], len(storages[address])) for address in storages})


def return_freed_memory() -> None:
    """Returns to the system what was freed, which malloc keeps for later; does nothing without glibc."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def copy_on_write(tensors: Mapping[Key, Tensor]) -> dict[Key, Tensor]:
    """Copies of those tensors that are in files; they take no memory until they are written to.

    Each is a copy of its own, also of tensors that are the same memory, as equal tensors of a checkpoint may be.
    """
    if not _files:
        return {}
    copies, mappings, uses = dict[Key, Tensor](), defaultdict[int, dict[int, MappedFile]](dict), Counter[int]()
    for key, tensor in tensors.items():
        for address, values in _storages([tensor]).items():
            copied = mapped_again(values, mappings[uses[address]])
            uses[address] += 1
            if copied is not None:
                copies |= _moved({key: tensor}, {address: copied})
    return copies


def mapped_again(values: Tensor, again: dict[int, MappedFile]) -> Tensor | None:
    """The same bytes in another mapping of their file; None if they are in none, or have been written to.

    ``again`` has the other mapping of each mapped file, by its address.
    """
    file = file_at(values.data_ptr(), len(values))
    if file is None:
        return None
    if file.start not in again:
        again[file.start] = MappedFile.of(file.file)
    copied = again[file.start].storage(values.data_ptr() - file.start, len(values))
    return copied if equal_bytes(copied, values) else None


def equal_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors of bytes are equal."""
    if len(one) == len(other) and not (len(one) | one.data_ptr() | other.data_ptr()) % 8:
        one, other = one.view(torch.int64), other.view(torch.int64)  # in a sixth of the time
    return torch.equal(one, other)


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a tensor on the CPU; None if it has none, or more than bytes, strides and a dtype describe it."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or is_lazy(tensor):
        return None
    if tensor.is_quantized or tensor.is_nested or tensor.is_conj() or tensor.is_neg():
        return None
    storage = tensor.untyped_storage()
    return storage if storage.nbytes() else None


def _storages(tensors: Iterable[Tensor]) -> dict[int, Tensor]:
    """The bytes of all storages, by address."""
    storages = [storage for tensor in tensors if (storage := storage_of(tensor)) is not None]
    return {each.data_ptr(): torch.empty(0, dtype=torch.uint8).set_(each) for each in storages}


def _moved(tensors: Mapping[Key, Tensor], storages: Mapping[int, Tensor]) -> dict[Key, Tensor]:
    """The tensors whose storages have another by address, in the others."""
    moved = {}
    for key, tensor in tensors.items():
        own = storage_of(tensor)
        if own is not None and (storage := storages.get(own.data_ptr())) is not None:
            place = storage.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride()
            moved[key] = torch.empty(0, dtype=tensor.dtype).set_(*place)
    return moved
