"""FEMNIST: handwriting by writer, from LEAF's files."""

from __future__ import annotations

import json
import os
from typing import Any

import numpy as np
import torch

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.datamodule import FederatedDataModule
from fedmoe_pl.data.datasets.images import READ_ERRORS
from fedmoe_pl.data.targets import reason_of


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
        has_test = os.path.isdir(os.path.join(self.root, "test"))
        if not has_test and not self.pool:
            raise InvalidArgumentError(self, "pool", False, "True", f"'{self.root}' has no folder test")
        x, y, writers = _read_folder(self.root, "train")
        x_test, y_test, test_writers = _read_folder(self.root, "test") if has_test else (x[:0], y[:0], writers[:0])
        arrays = (torch.from_numpy(array) for array in (x, y, x_test, y_test))
        return Arrays(*arrays, client_train=writers, client_test=test_writers)


def _read_folder(root: str, part: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns images (n, 1, 28, 28) as float32, classes and writers of all JSON files of a folder."""
    folder = os.path.join(root, part)
    paths = [os.path.join(folder, name) for name in sorted(os.listdir(folder))] if os.path.isdir(folder) else []
    paths = [path for path in paths if path.endswith(".json")]
    images, labels, writers = [], [], {}
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                content = json.load(file)
            for writer in content["users"]:
                if writer in writers:
                    raise ValueError(f"writer {writer} is listed twice")
                samples = content["user_data"][writer]
                images.append(np.array(samples["x"], dtype=np.float32).reshape(-1, 1, 28, 28))
                labels.append(_labels(samples["y"], writer))
                if len(images[-1]) != len(labels[-1]):
                    raise ValueError(f"writer {writer} has {len(images[-1])} images and {len(labels[-1])} labels")
                writers[writer] = len(images[-1])
        except (*READ_ERRORS, TypeError) as error:
            raise _refused(root, f"'{path}' is none of them ({reason_of(error)})") from error
    if not writers:
        raise _refused(root, f"'{os.path.abspath(folder)}' has no such files, or they list no users")
    return np.concatenate(images), np.concatenate(labels), np.repeat([*writers], [*writers.values()])


def _refused(root: str, reason: str) -> InvalidArgumentError:
    return InvalidArgumentError("FEMNIST", "root", root, "a folder with FEMNIST's files as LEAF writes them", reason)


def _labels(values: list[int], writer: str) -> np.ndarray:
    """A writer's classes, which NumPy would round."""
    labels = np.array(values)
    if len(labels) and labels.dtype.kind not in "iu":
        wrong = next((value for value in values if not isinstance(value, int)), values)
        raise ValueError(f"writer {writer} has the label {wrong}, which is not an integer")
    return labels.astype(np.int64)
