"""A user's own arrays in a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.client_names import files_of_clients
from fedmoe_pl.data.datamodule import FederatedDataModule
from fedmoe_pl.data.datasets.images import channels_first, resize

_NEEDED = ("x_train", "y_train", "x_test", "y_test")
_OPTIONAL = ("client_train", "client_test")


class NpzFile(FederatedDataModule):
    """A user's own arrays in one .npz file, or in one for each client.

    A file holds ``x_train``, ``y_train``, ``x_test`` and ``y_test``, and may hold ``client_train`` and
    ``client_test``, the id of the client that each sample comes from. Images are uint8, of shape (n, height, width),
    (n, height, width, channels) or (n, channels, height, width) with 1 or 3 channels; they are divided by 255 and
    normalized. Floating-point arrays of any shape (n, ...) are not changed, nor are integers of shape (n, length),
    which are ids of words from 0. Labels are integers of shape (n,), from 0; floating-point targets of any shape
    (n, ...), such as those of a regression, and integers of shape (n, k, ...), such as masks, are no classes.

    Args:
        path: the file; or a folder with a file for each client, who is called as the file without its ``.npz``.
        image_size: height and width that images are resized to; None to keep their size.
        mean: mean of each channel of the images in [0, 1]; None to compute it from the training images.
        std: standard deviation of each channel; None to compute it.
        **kwargs: arguments of ``FederatedDataModule``.
    """

    def __init__(
        self,
        path: str,
        image_size: int | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.path = path
        self.image_size = image_size
        self.mean = mean
        self.std = std

    def load(self) -> Arrays:
        """Reads the file or files."""
        arrays = self._read_files() if Path(self.path).is_dir() else _read(Path(self.path))
        return Arrays(
            y_train=self._to_targets("y_train", arrays["y_train"]),
            y_test=self._to_targets("y_test", arrays["y_test"]),
            x_train=resize(self, self._to_samples("x_train", arrays["x_train"]), self.image_size),
            x_test=resize(self, self._to_samples("x_test", arrays["x_test"]), self.image_size),
            client_train=arrays.get("client_train"),
            client_test=arrays.get("client_test"),
            mean=self.mean,
            std=self.std,
        )

    def _read_files(self) -> dict[str, np.ndarray]:
        """The arrays of all files of a folder, one after another, with the names of the files as ids."""
        of_clients = {path.stem: _read(path) for path in files_of_clients(Path(self.path), ".npz")}
        if not of_clients:
            raise InvalidArgumentError(self, "path", self.path, "an .npz file, or a folder with one for each client")
        arrays = {name: np.concatenate([each[name] for each in of_clients.values()]) for name in _NEEDED}
        for part in ("train", "test"):
            sizes = [len(each[f"y_{part}"]) for each in of_clients.values()]
            arrays[f"client_{part}"] = np.repeat([*of_clients], sizes)
        return arrays

    def _to_targets(self, name: str, array: np.ndarray) -> Tensor:
        """Targets as float32, or int64 for integers."""
        if array.dtype.kind not in "iubf":
            raise InvalidArgumentError(self, name, str(array.dtype), "integers from 0, or floating point")
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
        raise InvalidArgumentError(self, name, f"{array.dtype} of shape {array.shape}", allowed)


def _read(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {key: file[key] for key in (*_NEEDED, *_OPTIONAL) if key in _NEEDED or key in file}
