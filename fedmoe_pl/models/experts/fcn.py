"""A small fully convolutional network for dense prediction."""

from __future__ import annotations

from torch import Tensor, nn

from fedmoe_pl.checks import check_sizes


class SmallFCN(nn.Module):
    """Three convolutions that keep height and width, for small images and dense prediction.

    Args:
        in_channels: channels of the images.
        num_classes: number of outputs of each pixel.
        channels: width of the first two convolutions, which are the extractor.
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 2, channels: int = 16) -> None:
        super().__init__()
        check_sizes(self, in_channels=in_channels, num_classes=num_classes, channels=channels)
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.channels = channels
        self.extractor = nn.Sequential(
            nn.Conv2d(in_channels, channels, 5, padding="same"),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 5, padding="same"),
            nn.ReLU(),
        )
        self.classifier = nn.Conv2d(channels, num_classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (B, num_classes, height, width) for images (B, in_channels, height, width)."""
        return self.classifier(self.extractor(x))
