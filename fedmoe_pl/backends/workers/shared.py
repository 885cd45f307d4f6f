"""An object that this process shares with its workers through a file."""

from __future__ import annotations

import os
import pickle
import tempfile
from typing import Any

import numpy as np
import torch

from fedmoe_pl.backends.workers.pickling import Pickled, dumps, loads
from fedmoe_pl.data import FederatedDataModule
from fedmoe_pl.mapped import ALIGNMENT, MappedFile, OpenFile, file_at, mapped_again

_Span = tuple[str, int, int]  # path, first byte, number of bytes


class SharedObject:
    """An object in a file that the processes which load it map, so that its tensors are in memory once.

    Tensors that are in a file in memory stay there. A process that writes to a tensor gets a copy of the pages that it
    writes to. The file is deleted with this handle, and also however this process ends.
    """

    def __init__(self, obj: Any, datamodule: FederatedDataModule | None = None) -> None:
        buffers: list[pickle.PickleBuffer] = []
        pickled = dumps(obj, datamodule, buffer_callback=buffers.append)
        file = tempfile.TemporaryFile()
        own = OpenFile(file)
        self._files = {own}
        self.spans: list[_Span] = []
        written: dict[tuple[int, int], _Span] = {}
        again: dict[int, MappedFile] = {}
        for part in (pickled, *(buffer.raw() for buffer in buffers)):
            values = np.frombuffer(part, np.uint8)
            key = address, size = values.ctypes.data, len(part)
            if key not in written:
                mapped = file_at(address, size) if size else None
                if mapped is not None and mapped_again(torch.from_numpy(values), again) is not None:
                    self._files.add(mapped.file)
                    written[key] = mapped.file.path, address - mapped.start, size
                else:
                    written[key] = own.path, file.seek(-file.tell() % ALIGNMENT, os.SEEK_CUR), size
                    file.write(part)
            self.spans.append(written[key])
        file.flush()

    def content(self) -> Pickled:
        """The pickled object, and the buffers of its tensors, in the mapped files."""
        mapped = {path: MappedFile.of(OpenFile(open(path, "rb"))).data for path in {path for path, _, _ in self.spans}}
        pickled, *buffers = (mapped[path][start : start + size] for path, start, size in self.spans)
        return bytes(pickled), buffers

    def load(self) -> Any:
        """The object, in any process of this machine."""
        pickled, buffers = self.content()
        return loads(pickled, buffers=buffers)

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the open files."""
        return {"spans": self.spans}
