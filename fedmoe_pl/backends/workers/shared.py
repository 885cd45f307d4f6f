"""An object that this process shares with its workers through a file."""

from __future__ import annotations

import os
import pickle
import tempfile
from typing import Any
from weakref import finalize

import numpy as np

from fedmoe_pl.backends.workers.pickling import Pickled, dumps, loads
from fedmoe_pl.data import FederatedDataModule

_ALIGNMENT = 64  # bytes; that of PyTorch's own memory


class SharedObject:
    """An object in a file that the processes which load it map, so that its tensors are in memory once.

    A process that writes to a tensor gets a copy of the pages that it writes to. The file is deleted with this handle,
    and also however this process ends.
    """

    def __init__(self, obj: Any, datamodule: FederatedDataModule | None = None) -> None:
        buffers: list[pickle.PickleBuffer] = []
        pickled = dumps(obj, datamodule, buffer_callback=buffers.append)
        self._file = tempfile.TemporaryFile()
        finalize(self, self._file.close)
        # where all processes of this machine find it, although it has no name
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
        """The pickled object, and the buffers of its tensors, in the mapped file."""
        mapped = np.memmap(self.path, mode="c").data
        pickled, *buffers = (mapped[start : start + size] for start, size in self.spans)
        return bytes(pickled), buffers

    def load(self) -> Any:
        """The object, in any process of this machine."""
        pickled, buffers = self.content()
        return loads(pickled, buffers=buffers)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the open file."""
        return {"path": self.path, "spans": self.spans}
