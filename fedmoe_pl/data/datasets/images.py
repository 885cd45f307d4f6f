"""Reading errors, shapes and sizes of image data sets."""

from __future__ import annotations

import http.client
import lzma
import os
import struct
import zipfile
import zlib

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchvision.transforms.v2 import functional

_IMAGES_AT_ONCE = 4096

# Raised by numpy, zipfile, PIL or torchvision for a file that is missing, incomplete or damaged.
READ_ERRORS = (
    OSError,
    EOFError,
    struct.error,
    RuntimeError,
    ValueError,
    KeyError,
    AssertionError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    http.client.HTTPException,
)


def channels_first(images: np.ndarray | Tensor, name: str) -> Tensor:
    """Returns uint8 images as a tensor of shape (n, channels, height, width).

    Args:
        images: shape (n, height, width), or (n, channels, height, width) or (n, height, width, channels) with 1 or 3
            channels.
        name: the images' name in the message.

    Raises:
        MisconfigurationException: if the images have another shape.
    """
    x = torch.as_tensor(images)
    if x.dim() == 3:
        return x.unsqueeze(1)
    if x.dim() == 4 and x.shape[1] in (1, 3):
        return x
    if x.dim() == 4 and x.shape[3] in (1, 3):
        return x.permute(0, 3, 1, 2)
    raise MisconfigurationException(
        f"{name} has shape {tuple(x.shape)}, but images must have shape (n, height, width), (n, height, width, "
        "channels) or (n, channels, height, width) with 1 or 3 channels."
    )


def resize(images: Tensor, image_size: int | None) -> Tensor:
    """Resizes the shorter side to ``image_size`` (bilinear, with antialiasing) and cuts out the square centre.

    Args:
        images: shape (n, channels, height, width), uint8 or floating point.
        image_size: height and width of the result; None to return the images unchanged.

    Raises:
        MisconfigurationException: if the samples are not images, or do not fit into the machine's memory.
    """
    if image_size is None:
        return images
    if images.dim() != 4:
        raise MisconfigurationException(
            f"image_size is {image_size}, but samples of shape {tuple(images.shape)} cannot be resized: images have "
            "shape (n, channels, height, width)."
        )
    check_memory(image_size, len(images), images.shape[1] * images.element_size())
    resized = images.new_empty(*images.shape[:2], image_size, image_size)
    for out, chunk in zip(resized.split(_IMAGES_AT_ONCE), images.split(_IMAGES_AT_ONCE), strict=True):
        # contiguous, because torchvision's fast path for uint8 needs it
        out.copy_(functional.center_crop(functional.resize(chunk.contiguous(), [image_size]), [image_size]))
    return resized


def check_memory(image_size: int, images: int, bytes_per_pixel: int) -> None:
    """Refuses a size of images at which they would not fit into the machine's memory.

    Args:
        image_size: height and width.
        images: number of images.
        bytes_per_pixel: of all channels.

    Raises:
        MisconfigurationException: if they would not fit.
    """
    needed, memory = images * image_size**2 * bytes_per_pixel, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > memory:
        raise MisconfigurationException(
            f"image_size is {image_size}, but must be lower, because {images:,} images of that size need {needed:,} "
            f"bytes, and this machine has {memory:,}."
        )
