"""Images of data sets: their files, shapes and sizes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms.v2 import functional

from fedmoe_pl.checks import InvalidArgumentError, check_at_least, reason_of
from fedmoe_pl.data.datamodule import FederatedDataModule

_MOST_ELONGATED = 100  # times as long as wide; of a longer image, the square centre shows nearly nothing
_PIXELS_AT_ONCE = 2**24


class ImageDataModule(FederatedDataModule):
    """The base of data that may be images.

    Args:
        image_size: length to which the shorter side of every image is resized when it is read, before its square
            centre is cut out; None to keep their sizes, which must then be the same.
        mean: mean of each channel of the images in [0, 1]; None to compute it from the training images.
        std: standard deviation of each channel; None to compute it.
        **kwargs: arguments of ``FederatedDataModule``.
    """

    def __init__(
        self,
        image_size: int | None = None,
        mean: tuple[float, ...] | None = None,
        std: tuple[float, ...] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.image_size = image_size
        self.mean = mean
        self.std = std


def channels_first(owner: object, name: str, images: np.ndarray | Tensor) -> Tensor:
    """Uint8 images, with channels first, last or not at all, as a tensor of shape (n, channels, height, width)."""
    x = torch.as_tensor(images)
    if x.dim() == 3:
        return x.unsqueeze(1)
    if x.dim() == 4 and x.shape[1] in (1, 3):
        return x
    if x.dim() == 4 and x.shape[3] in (1, 3):
        return x.permute(0, 3, 1, 2)
    allowed = "(n, height, width), or (n, height, width, channels) or (n, channels, height, width) of 1 or 3 channels"
    raise InvalidArgumentError(owner, name, tuple(x.shape), allowed)


def read_images(owner: object, paths: Sequence[str], image_size: int | None) -> Tensor:
    """Images from files as RGB, uint8, shape (n, 3, height, width), resized as by :func:`resize`.

    They are rotated according to their EXIF orientation.

    Raises:
        MisconfigurationException: if a file cannot be read, has several images, or more than 8 bits per channel, of
            which Pillow would keep the first image, and make black and white or drop the other bits; or if an image to
            be resized is more than 100 times as long as wide.
    """
    images: list[Tensor] = []
    for path in paths:
        try:
            if os.path.exists(path) and not os.path.isfile(path):
                raise OSError(0, "it is no ordinary file")  # on a pipe, reading would wait
            with Image.open(path) as opened:
                frames = 1 if opened.format == "MPO" else getattr(opened, "n_frames", 1)  # a photograph and its preview
                is_deep = opened.mode.startswith(("I", "F")) or any(map(_is_deep, opened.tile))  # loading empties it
                with suppress(SyntaxError):  # EXIF data that are none, of an image that is one
                    ImageOps.exif_transpose(opened, in_place=True)  # phones store how they were held
                image = functional.pil_to_tensor(opened.convert("RGB"))
        except Exception as error:  # of a broken file, Pillow raises anything, such as a SyntaxError
            reason = getattr(error, "strerror", reason_of(error)) or "its content is not that of an image"
            raise MisconfigurationException(f"{type(owner).__name__}: '{path}' cannot be read: {reason}.") from error
        if frames > 1:
            raise MisconfigurationException(
                f"{type(owner).__name__}: '{path}' has {frames} pages or frames, but must have one; save each of them."
            )
        if is_deep:
            raise MisconfigurationException(
                f"{type(owner).__name__}: '{path}' has more than 8 bits per channel; "
                "scale its values to 0 to 255 and save it again."
            )
        images.append(resize(owner, image.unsqueeze(0), image_size, f"'{path}'")[0])
        if image_size is None and image.shape != images[0].shape:
            own, first = ("{1} x {2} pixels".format(*shape) for shape in (image.shape, images[0].shape))
            because = f"'{path}' has {own}, and '{paths[0]}' {first}"
            raise InvalidArgumentError(owner, "image_size", None, "given for images of several sizes", because)
    return torch.stack(images)


def _is_deep(tile: Any) -> bool:
    """Whether Pillow's description of encoded pixels says that they have more than 8 bits per channel."""
    return ";16" in str(tile.args) or (tile.codec_name == "ppm" and tile.args[1] > 255)


def resize(owner: object, images: Tensor, image_size: int | None, name: str = "an image") -> Tensor:
    """Resizes the shorter side (bilinear, with antialiasing) and cuts out the square centre; None changes nothing.

    The refusal of one that is too long, which could take any memory, begins with ``name``.
    """
    if image_size is None:
        return images
    if images.dim() != 4:
        raise InvalidArgumentError(owner, "image_size", image_size, "None for samples that are not images")
    check_at_least(owner, "image_size", image_size, 1)
    height, width = images.shape[2:]
    shorter, longer = sorted((height, width))
    if not 0 < longer <= _MOST_ELONGATED * shorter:
        raise MisconfigurationException(
            f"{type(owner).__name__}: {name} has {width} x {height} pixels, but to be resized to image_size "
            f"{image_size}, it must have a longer side of at most {_MOST_ELONGATED} times the shorter one."
        )
    at_once = max(1, _PIXELS_AT_ONCE * shorter // (longer * image_size**2))
    resized = images.new_empty(*images.shape[:2], image_size, image_size)
    for out, chunk in zip(resized.split(at_once), images.split(at_once), strict=True):
        # contiguous, because torchvision's fast path for uint8 needs it
        out.copy_(functional.center_crop(functional.resize(chunk.contiguous(), [image_size]), [image_size]))
    return resized
