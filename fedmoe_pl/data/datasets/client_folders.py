"""A user's own images, in a folder for each client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.class_names import numbered_classes
from fedmoe_pl.data.datasets.images import ImageDataModule, VisibleImages, read_images


class ClientFolders(ImageDataModule):
    """A user's own images, a folder for each client with one for each of its classes: ``hospital_A/tumour/1.png``.

    Clients are called as their folders, and numbered in the sorted order of their names. Classes are numbered in the
    sorted order of the names that any client has; a client may lack some. A warning tells which name may be misspelt.
    Images are read as RGB, with 8 bits per channel, and rotated according to their EXIF orientation. Files with another
    ending than an image's are left out, and so are hidden files and folders.

    Args:
        root: folder with the clients' folders.
        test_root: folder like it with the clients' test images; None to hold out ``test_fraction`` of those in
            ``root``. The global test set has the test images of all clients.
        classes: names of all classes, in the order of their numbers; others are refused. None for those in the folders.
            Needed in a deployed federation, where no client sees the folders of the others.
        **kwargs: arguments of ``ImageDataModule``.
    """

    def __init__(
        self,
        root: str,
        test_root: str | None = None,
        classes: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(pool=test_root is None, **kwargs)
        self.root = root
        self.test_root = test_root
        self.classes = classes

    def load(self) -> Arrays:
        """Reads all images."""
        samples = self._samples("root", self.root)
        number = len(samples)
        if self.test_root is not None:
            samples += self._samples("test_root", self.test_root)
        clients, classes, paths = zip(*samples, strict=True)
        self.files = [*paths]
        x, y = read_images(self, paths, self.image_size), numbered_classes(self, classes, clients)
        ids = np.array(clients)
        return Arrays(
            *(x[:number], y[:number], x[number:], y[number:], ids[:number], ids[number:]), mean=self.mean, std=self.std
        )

    def _samples(self, argument: str, root: str) -> list[tuple[str, str, str]]:
        """Client, class and path of each image in a folder."""
        # of all folders below root, torchvision's reader takes the first for a class: here, it is the client
        folders = VisibleImages(self, argument, root, allow_empty=True)
        parts = [(client, path, Path(path).relative_to(root).parts) for path, client in folders.samples]
        for _, path, (_, *below) in parts:
            if len(below) < 2:
                allowed = "a folder with one folder per client, each with one folder of images per class"
                raise InvalidArgumentError(self, argument, root, allowed, f"'{path}' is in no folder of a class")
        if empty := {*range(len(folders.classes))} - {client for client, *_ in parts}:
            reason = f"{folders.classes[min(empty)]} has none; delete its folder if it takes no part"
            raise InvalidArgumentError(self, argument, root, "a folder in which every client has images", reason)
        return [(folders.classes[client], of_class, path) for client, path, (_, of_class, *_) in parts]
