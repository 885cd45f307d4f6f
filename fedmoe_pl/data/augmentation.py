"""Random changes of training images, drawn for each image and computed on whole batches."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Generator, Tensor

from fedmoe_pl.checks import check_at_least, check_number


class Augmentation(ABC):
    """Changes a batch of normalized images at random; derive from it to write your own augmentation."""

    @abstractmethod
    def __call__(self, x: Tensor, generator: Generator | None = None, black: Tensor | None = None) -> Tensor:
        """Returns changed images; ``x`` itself is not changed.

        Args:
            x: normalized images, shape (n, channels, height, width).
            generator: source of randomness, on any device; None for PyTorch's global one.
            black: value of a black pixel after normalization, shape (channels, 1, 1); None for 0.

        Returns:
            Images of the same shape, type and device.
        """


class RandomCrop(Augmentation):
    """Shifts every image by up to ``padding`` pixels in each direction and fills the border with black.

    It does the same as torchvision's ``RandomCrop(size, padding)`` before normalization.

    Args:
        padding: largest shift, in pixels.
    """

    def __init__(self, padding: int = 4) -> None:
        check_at_least(self, "padding", padding, 0)
        self.padding = padding

    def __call__(self, x: Tensor, generator: Generator | None = None, black: Tensor | None = None) -> Tensor:
        """Changes the images."""
        n, channels, height, width = x.shape
        p = self.padding
        padded = x.new_zeros(n, channels, height + 2 * p, width + 2 * p)
        if black is not None:
            padded.copy_(black)
        padded[:, :, p : p + height, p : p + width] = x
        device = generator.device if generator else None
        top, left = torch.randint(2 * p + 1, (2, n), generator=generator, device=device).to(x.device)
        per_image, per_channel, per_row, _ = padded.stride()
        first_pixel = torch.arange(n, device=x.device) * per_image + top * per_row + left
        # A view of the windows that start at each pixel: 2 to 4 times as fast as indexing rows and columns.
        last = (channels - 1) * per_channel + (height - 1) * per_row + width - 1
        windows = padded.as_strided((padded.numel() - last, channels, height, width), (1, per_channel, per_row, 1))
        return windows.index_select(0, first_pixel)


class RandomHorizontalFlip(Augmentation):
    """Mirrors every image left to right with probability ``p``.

    Args:
        p: probability of the flip, from 0 to 1.
    """

    def __init__(self, p: float = 0.5) -> None:
        check_number(self, "p", p, least=0, most=1)
        self.p = p

    def __call__(self, x: Tensor, generator: Generator | None = None, black: Tensor | None = None) -> Tensor:
        """Changes the images."""
        device = generator.device if generator else None
        flip = torch.rand(len(x), 1, 1, 1, generator=generator, device=device) < self.p
        return torch.where(flip.to(x.device), x.flip(-1), x)
