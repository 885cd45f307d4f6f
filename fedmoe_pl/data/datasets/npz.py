"""A user's own arrays in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data.arrays import Arrays, read_npz, type_and_shape
from fedmoe_pl.data.client_names import files_of_clients
from fedmoe_pl.data.datasets.images import ImageDataModule, channels_first, resize

_NEEDED = ("x_train", "y_train", "x_test", "y_test")
_OPTIONAL = ("client_train", "client_test")


class NpzFile(ImageDataModule):
    """A user's own arrays in one .npz file, or in one for each client.

    A file holds ``x_train``, ``y_train``, ``x_test`` and ``y_test``. A file of all clients may also hold
    ``client_train`` and ``client_test``, the id of the client that each sample comes from. Images are uint8, of shape
    (n, height, width), (n, height, width, channels) or (n, channels, height, width) with 1 or 3 channels; they are
    divided by 255 and normalized. Floating-point arrays of any shape (n, ...) are not changed, nor are integers of
    shape (n, length), which are ids of words from 0. Labels are integers of shape (n,), from 0, or -100 for a training
    sample without one, see :class:`Arrays`; floating-point targets of any shape (n, ...), such as those of a
    regression, and integers of shape (n, k, ...), such as masks, are no classes.

    Args:
        path: the file; or a folder with a file for each client, who is called as the file without its ``.npz``.
        **kwargs: arguments of ``ImageDataModule``.
    """

    def __init__(self, path: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.path = path

    def load(self) -> Arrays:
        """Reads the file or files."""
        path = Path(self.path)
        return Arrays(**(self._read_files(path) if path.is_dir() else self._read(path)), mean=self.mean, std=self.std)

    def _read_files(self, folder: Path) -> dict[str, Any]:
        """The arrays of all files of a folder, one after another, with the names of the files as ids."""
        of_clients = {path.stem: self._read(path) for path in files_of_clients(self, "path", folder, ".npz")}
        if not of_clients:
            raise InvalidArgumentError(self, "path", self.path, "an .npz file, or a folder with one for each client")
        first = next(iter(of_clients))
        for client, arrays in of_clients.items():
            if ids := [name for name in _OPTIONAL if name in arrays]:
                because = f"each is of one client, and '{client}.npz' has it"
                raise InvalidArgumentError(self, "path", self.path, f"a folder of files without {ids[0]}", because)
            for name in _NEEDED:
                own, like = arrays[name], of_clients[first][name]
                kinds = {each.dtype for each in (own, like)}
                # samples that are integers become floating point beside such ones; images and classes do not
                is_alike = len(kinds) == 1 or (name.startswith("x") and torch.uint8 not in kinds)
                if not is_alike or own.shape[1:] != like.shape[1:]:
                    allowed = "a folder whose files have arrays of the same type and shape"
                    because = f"{name} of '{client}.npz' is {type_and_shape(own)}, and of '{first}.npz' "
                    raise InvalidArgumentError(self, "path", self.path, allowed, because + type_and_shape(like))
            for part in ("train", "test"):
                x, y = arrays[f"x_{part}"], arrays[f"y_{part}"]
                if x.shape[:1] != y.shape[:1]:
                    because = f"y_{part} of '{client}.npz' is {type_and_shape(y)}, and x_{part} {type_and_shape(x)}"
                    raise InvalidArgumentError(
                        self, "path", self.path, "a folder of files with targets of all samples", because
                    )
            if not len(arrays["y_train"]):
                because = f"'{client}.npz' has none; delete it if this client takes no part"
                raise InvalidArgumentError(self, "path", self.path, "a folder of files with training samples", because)
        joined: dict[str, Any] = {name: torch.cat([arrays[name] for arrays in of_clients.values()]) for name in _NEEDED}
        for part in ("train", "test"):
            sizes = [len(arrays[f"y_{part}"]) for arrays in of_clients.values()]
            joined[f"client_{part}"] = np.repeat([*of_clients], sizes)
        return joined

    def _read(self, path: Path) -> dict[str, Any]:
        """The arrays of a file: samples and targets as tensors, ids as they are."""
        arrays: dict[str, Any] = {**read_npz(self, "path", path, (*_NEEDED, *_OPTIONAL))}
        if missing := [name for name in _NEEDED if name not in arrays]:
            allowed, because = f"a file with {', '.join(_NEEDED)}", f"'{path}' has no {missing[0]}"
            raise InvalidArgumentError(self, "path", self.path, allowed, because)
        for part in ("train", "test"):
            x, y = f"x_{part}", f"y_{part}"
            arrays[y] = self._to_targets(y, arrays[y])
            arrays[x] = resize(self, self._to_samples(x, arrays[x]), self.image_size)
        return arrays

    def _to_targets(self, name: str, array: np.ndarray) -> Tensor:
        """Targets as float32, or int64 for integers."""
        if array.dtype.kind not in "iubf":
            allowed = (
                "integers from 0, which np.unique(labels, return_inverse=True)[1] makes of labels, or floating point"
            )
            raise InvalidArgumentError(self, name, type_and_shape(array), allowed)
        with np.errstate(over="ignore"):  # what becomes infinite is refused
            return torch.from_numpy(array.astype(np.float32 if array.dtype.kind == "f" else np.int64))

    def _to_samples(self, name: str, array: np.ndarray) -> Tensor:
        """Images as uint8, other samples as float32 or int64."""
        if array.dtype == np.uint8:
            return channels_first(self, name, array)
        if array.dtype.kind == "f" and array.ndim > 0:
            with np.errstate(over="ignore"):  # what becomes infinite is refused
                return torch.from_numpy(array.astype(np.float32))
        if array.dtype.kind in "iu" and array.ndim == 2:
            return torch.from_numpy(array.astype(np.int64))
        allowed = "uint8 images, floating point, or integer ids of words (n, length)"
        raise InvalidArgumentError(self, name, type_and_shape(array), allowed)
