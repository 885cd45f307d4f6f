"""Pickles what the driver and its workers send each other, or shares it in a file."""

from __future__ import annotations

import io
import os
import pickle
import tempfile
from collections.abc import Callable, Sequence
from typing import Any
from weakref import finalize

import cloudpickle
import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.trees import Tree

Pickled = tuple[bytes, Sequence[Any]]
"""A pickled object, and the buffers of its tensors and arrays, which are kept separately."""


def sendable(what: str, pickle_it: Callable[[], Any]) -> Any:
    """Calls a function that pickles something for a worker; if it fails, explains why."""
    try:
        return pickle_it()
    except (pickle.PicklingError, TypeError, AttributeError, NotImplementedError, RuntimeError, OSError) as error:
        raise MisconfigurationException(
            f"trainer.devices must be 1 here, because {what} cannot be sent to a worker process "
            f"({str(error).splitlines()[0]})."
        ) from error


class _Pickler(cloudpickle.Pickler):
    """Pickles by value, including lambdas and classes of ``__main__``.

    Leaves out the data module and the tensors that the receiver has, and the CLI, to which LightningCLI's optimizer
    factories refer and which holds everything that was configured.
    """

    def __init__(
        self,
        file: io.BytesIO,
        datamodule: FederatedDataModule | None,
        known: Tree,
        buffer_callback: Callable[[pickle.PickleBuffer], Any] | None,
    ) -> None:
        super().__init__(file, protocol=5, buffer_callback=buffer_callback)
        self.datamodule = datamodule
        self.known = {id(tensor): name for name, tensor in known.items()}

    def persistent_id(self, obj: Any) -> str | tuple[str] | None:
        if obj is self.datamodule and obj is not None:
            return "datamodule"
        if type(obj) is Tensor and id(obj) in self.known:
            return (self.known[id(obj)],)
        return "cli" if isinstance(obj, LightningCLI) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and is_parametrized(obj):  # PyTorch copies these, but refuses to pickle them
            return object.__new__, (type(obj),), vars(obj)
        # pickled as an array, because PyTorch would pickle a view together with the whole tensor
        if type(obj) is not Tensor or obj.device.type != "cpu" or obj.requires_grad or obj.layout is not torch.strided:
            return super().reducer_override(obj)
        if obj.dtype in _AS_INTEGERS:
            return Tensor.view, (obj.view(_AS_INTEGERS[obj.dtype]), obj.dtype)
        if obj.dtype in _NUMPY_DTYPES:
            if any(obj.is_contiguous(memory_format=of) for of in (torch.channels_last, torch.channels_last_3d)):
                # with strides, which NumPy changes for dimensions of size 1: PyTorch infers the memory format from them
                return Tensor.as_strided, (obj.as_strided((obj.numel(),), (1,)), tuple(obj.shape), obj.stride())
            return torch.from_numpy, (obj.numpy(),)
        return super().reducer_override(obj)


_NUMPY_DTYPES = {
    *(torch.float16, torch.float32, torch.float64, torch.bool),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32, torch.uint64),
}

# NumPy lacks these data types, and PyTorch cannot unpickle 8-bit floats
_AS_INTEGERS = {dtype: torch.uint8 for name, dtype in vars(torch).items() if name.startswith("float8_")}
_AS_INTEGERS[torch.bfloat16] = torch.int16


class _Unpickler(pickle.Unpickler):
    def __init__(
        self, pickled: bytes, datamodule: FederatedDataModule | None, known: Tree, buffers: Sequence[Any] | None
    ) -> None:
        super().__init__(io.BytesIO(pickled), buffers=buffers)
        self.datamodule = datamodule
        self.known = known

    def persistent_load(self, pid: str | tuple[str]) -> Any:
        if isinstance(pid, tuple):
            return self.known[pid[0]]
        return self.datamodule if pid == "datamodule" else None


def dumps(
    obj: Any,
    datamodule: FederatedDataModule | None = None,
    known: Tree | None = None,
    buffer_callback: Callable[[pickle.PickleBuffer], Any] | None = None,
) -> bytes:
    """Pickles an object by value, except for tensors in ``known``, which the receiver has and finds by name."""
    file = io.BytesIO()
    _Pickler(file, datamodule, known or {}, buffer_callback).dump(obj)
    return file.getvalue()


def loads(
    pickled: bytes,
    datamodule: FederatedDataModule | None = None,
    known: Tree | None = None,
    buffers: Sequence[Any] | None = None,
) -> Any:
    """Unpickles an object; arguments as in :func:`dumps`."""
    return _Unpickler(pickled, datamodule, known or {}, buffers).load()


_ALIGNMENT = 64  # bytes, as in memory that PyTorch allocates


class SharedObject:
    """An object in a file that is mapped by every process that loads it, so that its tensors are in memory once.

    A process that writes to a tensor gets its own copy of the pages it writes to. The file is deleted with this handle
    or when this process ends, however it ends.
    """

    def __init__(self, obj: Any, datamodule: FederatedDataModule | None = None) -> None:
        buffers: list[pickle.PickleBuffer] = []
        pickled = dumps(obj, datamodule, buffer_callback=buffers.append)
        self._file = tempfile.TemporaryFile()
        finalize(self, self._file.close)
        # a path for all processes of this machine, although the file has no name
        self.path = f"/proc/{os.getpid()}/fd/{self._file.fileno()}"
        self.spans: list[tuple[int, int]] = []  # first byte and number of bytes
        written: dict[tuple[int, int], tuple[int, int]] = {}
        for part in (pickled, *(buffer.raw() for buffer in buffers)):
            key = np.frombuffer(part, np.uint8).ctypes.data, len(part)
            if key not in written:
                written[key] = self._file.seek(-self._file.tell() % _ALIGNMENT, os.SEEK_CUR), len(part)
                self._file.write(part)
            self.spans.append(written[key])
        self._file.flush()

    def content(self) -> Pickled:
        """The pickled object, and its tensors' buffers in the mapped file."""
        mapped = np.memmap(self.path, mode="c").data
        pickled, *buffers = (mapped[start : start + size] for start, size in self.spans)
        return bytes(pickled), buffers

    def load(self) -> Any:
        """Loads the object, in any process of this machine."""
        pickled, buffers = self.content()
        return loads(pickled, buffers=buffers)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the open file."""
        return {"path": self.path, "spans": self.spans}
