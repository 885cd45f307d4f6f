"""A user's own images in folders."""

from __future__ import annotations

from typing import Any

from fedmoe_pl.data.arrays import Arrays
from fedmoe_pl.data.class_names import numbered_classes
from fedmoe_pl.data.datasets.images import ImageDataModule, VisibleImages, read_images


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

    def __init__(
        self,
        train_dir: str,
        test_dir: str,
        classes: list[str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.train_dir = train_dir
        self.test_dir = test_dir
        self.classes = classes

    def load(self) -> Arrays:
        """Reads all images."""
        train = VisibleImages(self, "train_dir", self.train_dir)
        test = VisibleImages(self, "test_dir", self.test_dir)
        self.classes = self.classes or train.classes
        self.files = [path for path, _ in (*train.samples, *test.samples)]
        # by name, because a folder without some of the classes numbers the others differently
        y, y_test = (
            numbered_classes(self, [part.classes[target] for target in part.targets], [f"'{part.root}'"] * len(part))
            for part in (train, test)
        )
        return Arrays(
            read_images(self, [path for path, _ in train.samples], self.image_size),
            y,
            read_images(self, [path for path, _ in test.samples], self.image_size),
            y_test,
            mean=self.mean,
            std=self.std,
        )
