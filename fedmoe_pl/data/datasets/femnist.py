"""FEMNIST: handwriting by writer, from LEAF's files."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import torch

from fedmoe_pl.checks import InvalidArgumentError, tried
from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.datamodule import FederatedDataModule


class FEMNIST(FederatedDataModule):
    """FEMNIST: handwritten digits and letters, 28 x 28 pixels, 62 classes; a client is a writer (Caldas et al. 2018).

    It is read from the JSON files that LEAF's ``preprocess.sh`` writes into ``root/train`` and ``root/test``. Pixels go
    from 0 (ink) to 1 (background), as in LEAF, without normalization. If there is no ``root/test``, or to replace
    LEAF's split, set ``pool`` and ``test_fraction`` to hold out a share of each writer's images.

    Args:
        root: folder with the folders train and test.
        **kwargs: arguments of ``FederatedDataModule``.
    """

    def __init__(self, root: str = "data", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.root = root

    def load(self) -> Arrays:
        """Reads all files."""
        x, y, writers = self._read_folder("train")
        x_test, y_test, test_writers = x[:0], y[:0], writers[:0]
        if not self.pool or os.path.isdir(os.path.join(self.root, "test")):
            x_test, y_test, test_writers = self._read_folder("test")
        arrays = (torch.from_numpy(array) for array in (x, y, x_test, y_test))
        return Arrays(*arrays, client_train=writers, client_test=test_writers)

    def _read_folder(self, part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Images (n, 1, 28, 28) as float32, classes and writers of all JSON files of a folder."""
        folder = os.path.join(self.root, part)
        images, labels, writers = [], [], []
        allowed = "a folder with FEMNIST's files as LEAF writes them"
        for path in (os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.endswith(".json")):
            with tried(f"{type(self).__name__}: '{path}' cannot be read"), open(path, encoding="utf-8") as file:
                content = json.load(file)
                for writer in content["users"]:
                    samples = content["user_data"][writer]
                    x, y = np.array(samples["x"], dtype=np.float32).reshape(-1, 1, 28, 28), np.array(samples["y"])
                    if len(x) != len(y) or (len(y) and y.dtype.kind not in "iu"):
                        reason = f"'{path}' does not have an integer for each image of writer {writer}"
                        raise InvalidArgumentError(self, "root", self.root, allowed, reason)
                    images.append(x)
                    labels.append(y.astype(np.int64))
                    writers.append(np.full(len(y), writer))
        if not images:
            raise InvalidArgumentError(self, "root", self.root, allowed, f"'{folder}' has no writers")
        return np.concatenate(images), np.concatenate(labels), np.concatenate(writers)
