"""A user's own images in folders: one for each class, or one for each client with one for each of its classes."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from torchvision import datasets
from torchvision.datasets.folder import IMG_EXTENSIONS, is_image_file

from fedmoe_pl.checks import InvalidArgumentError, reason_of
from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.class_names import numbered_classes
from fedmoe_pl.data.datasets.images import ImageDataModule, read_images


class ImageFolder(ImageDataModule):
    """A user's own images, one folder per class, such as ``train/cat/1.png`` and ``test/cat/2.png``.

    Images are read as RGB, with 8 bits per channel, and rotated according to their EXIF orientation, also those in
    folders within a class's. Hidden files are left out; a warning counts other files that are no images by their names.
    Classes are numbered in the order of ``classes`` or, without it, of the sorted names of the folders in
    ``train_dir``.

    Args:
        train_dir: folder of the training images.
        test_dir: folder of the images of the global test set, of the same classes.
        classes: names of all classes, in the order of their numbers; others are refused. None for those in
            ``train_dir``. Needed in a deployed federation, where no client sees the folders of the others.
        **kwargs: arguments of ``ImageDataModule``.
    """

    def __init__(self, train_dir: str, test_dir: str, classes: list[str] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.train_dir = train_dir
        self.test_dir = test_dir
        self.classes = classes

    def load(self) -> Arrays:
        """Reads all images."""
        train = VisibleImages(self, "train_dir", self.train_dir)
        test = VisibleImages(self, "test_dir", self.test_dir)
        self.classes = self.classes or train.classes
        paths = self.files = [path for path, _ in (*train.samples, *test.samples)]
        # by name, because a folder without some of the classes numbers the others differently
        y, y_test = (
            numbered_classes(self, [part.classes[target] for target in part.targets], [f"'{part.root}'"] * len(part))
            for part in (train, test)
        )
        x, n = read_images(self, paths, self.image_size), len(train)
        return Arrays(x[:n], y, x[n:], y_test, mean=self.mean, std=self.std)


class ClientFolders(ImageDataModule):
    """A user's own images, a folder for each client with one for each of its classes: ``hospital_A/tumour/1.png``.

    Clients are called as their folders, and numbered in the sorted order of their names. Classes are numbered in the
    sorted order of the names that any client has; a client may lack some. In both, names that are all integers are
    sorted by their size. A warning tells which name may be misspelt.
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
        self, root: str, test_root: str | None = None, classes: list[str] | None = None, **kwargs: Any
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
        parts = [(client, path, Path(path).relative_to(folders.root).parts) for path, client in folders.samples]
        for _, path, (_, *below) in parts:
            if len(below) < 2:
                allowed = "a folder with one folder per client, each with one folder of images per class"
                raise InvalidArgumentError(self, argument, root, allowed, f"'{path}' is in no folder of a class")
        if empty := {*range(len(folders.classes))} - {client for client, *_ in parts}:
            reason = f"{folders.classes[min(empty)]} has none; delete its folder if it takes no part"
            raise InvalidArgumentError(self, argument, root, "a folder in which every client has images", reason)
        return [(folders.classes[client], of_class, path) for client, path, (_, of_class, *_) in parts]


class VisibleImages(datasets.ImageFolder):
    """Images in folders, without what Jupyter and macOS hide: names that begin with a dot, and ``__MACOSX``.

    Args:
        owner: the data module that a refusal names.
        argument: its argument with the folder.
        root: the folder.
        allow_empty: whether a folder in it may have no images.
    """

    def __init__(self, owner: object, argument: str, root: str, allow_empty: bool = False) -> None:
        self._left_out = Counter[str]()
        try:
            super().__init__(root, is_valid_file=self._is_visible_image, allow_empty=allow_empty)
        except FileNotFoundError as error:
            reason = reason_of(error)
            raise InvalidArgumentError(owner, argument, root, "a folder with folders of images", reason) from error
        if self._left_out:
            endings = ", ".join(f"{number} {ending}" for ending, number in self._left_out.most_common())
            rank_zero_warn(
                f"{type(owner).__name__}: files in {argument} '{root}' are left out ({endings}), beside {len(self)} "
                f"images, which must end in {', '.join(IMG_EXTENSIONS)}."
            )

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """The names of the visible folders, and their numbers."""
        names = [name for name in super().find_classes(directory)[0] if _is_visible(name)]
        if not names:
            raise FileNotFoundError(f"Couldn't find any class folder in {directory}")  # as torchvision
        return names, {name: number for number, name in enumerate(names)}

    def _is_visible_image(self, path: str) -> bool:
        if not all(map(_is_visible, Path(path).relative_to(self.root).parts)):
            return False
        if not (is_image := is_image_file(path)):
            self._left_out[Path(path).suffix or "without an ending"] += 1
        return is_image


def _is_visible(name: str) -> bool:
    return not name.startswith(".") and name != "__MACOSX"
