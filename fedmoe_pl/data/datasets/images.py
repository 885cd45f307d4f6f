"""From stored images to tensors of shape (n, channels, height, width)."""

from __future__ import annotations

import http.client
import lzma
import struct
import zipfile
import zlib

import numpy as np
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchvision.transforms.v2 import functional

_IMAGES_AT_ONCE = 4096

# What reading a missing, cut off or damaged file raises, in numpy, zipfile, PIL or torchvision.
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


def checked_image_size(image_size: int | None) -> int | None:
    """Return ``image_size``, or refuse it.

    Raises:
        MisconfigurationException: if it is below 1.
    """
    if image_size is not None and image_size < 1:
        raise MisconfigurationException(
            f"data.init_args.image_size is {image_size}, but must be an integer of at least 1, or null."
        )
    return image_size


def channels_first(images: np.ndarray | Tensor, name: str) -> Tensor:
    """Return uint8 images as a tensor of shape (n, channels, height, width).

    Args:
        images: shape (n, height, width), or (n, channels, height, width) or (n, height, width, channels) with 1 or 3
            channels.
        name: what an error calls them.

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
    """Resize the shorter side to ``image_size`` (bilinear, with antialiasing) and cut out the square centre.

    Args:
        images: shape (n, channels, height, width), uint8 or floating point.
        image_size: height and width of the result; None returns ``images``.

    Raises:
        MisconfigurationException: if the samples are no images.
    """
    if image_size is None:
        return images
    if images.dim() != 4:
        raise MisconfigurationException(
            f"data.init_args.image_size is {image_size}, but samples of shape {tuple(images.shape)} cannot be resized: "
            "images have shape (n, channels, height, width)."
        )
    resized = images.new_empty(*images.shape[:2], image_size, image_size)
    for out, some in zip(resized.split(_IMAGES_AT_ONCE), images.split(_IMAGES_AT_ONCE), strict=True):
        # copies: torchvision's fast path for uint8 wants them dense
        out.copy_(functional.center_crop(functional.resize(some.contiguous(), [image_size]), [image_size]))
    return resized
