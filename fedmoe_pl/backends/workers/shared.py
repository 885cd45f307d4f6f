"""An object that this process shares with its workers through a file."""

from __future__ import annotations

import mmap
import os
import pickle
import sys
import tempfile
import weakref
from typing import Any

import numpy as np

from fedmoe_pl.backends.workers.pickling import Pickled, dumps, loads
from fedmoe_pl.data import FederatedDataModule

_ALIGNMENT = 64  # bytes; that of PyTorch's own memory


class SharedObject:
    """An object in a file that the processes which load it map, so that its tensors are in memory once.

    A process that writes to one of these tensors gets a copy of the pages that it writes to. The file is deleted with
    this handle, and also however this process ends.
    """

    def __init__(self, obj: Any, datamodule: FederatedDataModule | None = None) -> None:
        buffers: list[pickle.PickleBuffer] = []
        pickled = dumps(obj, datamodule, buffer_callback=buffers.append)
        if sys.platform == "linux":
            file = tempfile.TemporaryFile()  # without a name
            self.path = f"/proc/{os.getpid()}/fd/{file.fileno()}"
        else:
            file = tempfile.NamedTemporaryFile()
            self.path = file.name
        weakref.finalize(self, file.close)
        self.spans: list[tuple[int, int]] = []
        written: dict[tuple[int, int], tuple[int, int]] = {}
        for part in (pickled, *(buffer.raw() for buffer in buffers)):
            key = np.frombuffer(part, np.uint8).ctypes.data, len(part)
            if key not in written:
                written[key] = file.seek(-file.tell() % _ALIGNMENT, os.SEEK_CUR), len(part)
                file.write(part)
            self.spans.append(written[key])
        file.flush()

    def content(self) -> Pickled:
        """The pickled object, and the buffers of its tensors, in the mapped file."""
        with open(self.path, "rb") as file:
            mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
        pickled, *buffers = (mapped[start : start + size] for start, size in self.spans)
        return bytes(pickled), buffers

    def load(self) -> Any:
        """The object, in any process of this machine."""
        pickled, buffers = self.content()
        return loads(pickled, buffers=buffers)
