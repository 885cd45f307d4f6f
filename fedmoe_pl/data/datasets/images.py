"""Shapes and sizes of image data sets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torchvision.datasets.folder import default_loader
from torchvision.transforms.v2 import functional

from fedmoe_pl.checks import InvalidArgumentError, check_at_least

_IMAGES_AT_ONCE = 4096


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
    """Images from files as RGB, uint8, shape (n, 3, height, width), resized as by :func:`resize`."""
    images: list[Tensor] = []
    for path in paths:
        image = functional.pil_to_tensor(default_loader(path))
        images.append(resize(owner, image.unsqueeze(0), image_size)[0])
        if image_size is None and image.shape != images[0].shape:
            own, first = ("{1} x {2} pixels".format(*shape) for shape in (image.shape, images[0].shape))
            because = f"'{path}' has {own}, and '{paths[0]}' {first}"
            raise InvalidArgumentError(owner, "image_size", None, "given for images of several sizes", because)
    return torch.stack(images)


def resize(owner: object, images: Tensor, image_size: int | None) -> Tensor:
    """Resizes the shorter side (bilinear, with antialiasing) and cuts out the square centre; None changes nothing."""
    if image_size is None:
        return images
    if images.dim() != 4:
        raise InvalidArgumentError(owner, "image_size", image_size, "None for samples that are not images")
    check_at_least(owner, "image_size", image_size, 1)
    resized = images.new_empty(*images.shape[:2], image_size, image_size)
    for out, chunk in zip(resized.split(_IMAGES_AT_ONCE), images.split(_IMAGES_AT_ONCE), strict=True):
        # contiguous, because torchvision's fast path for uint8 needs it
        out.copy_(functional.center_crop(functional.resize(chunk.contiguous(), [image_size]), [image_size]))
    return resized
