"""The networks of PFL-MoE."""

from __future__ import annotations

from torch import nn

from fedmoe_pl.models.experts.expert import Expert
from fedmoe_pl.models.layers import FanOutConv2d


class LeNet5(Expert):
    """LeNet-5 with ReLU and max pooling (PFL-MoE); 61,706 parameters with one input channel.

    Args:
        in_channels: channels of the input, shape (B, in_channels, 32, 32).
        num_classes: number of outputs.

    Example:
        >>> sum(p.numel() for p in LeNet5(in_channels=3).parameters())
        62006
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 10) -> None:
        super().__init__(locals())
        self.input_shape = (in_channels, 32, 32)
        self.extractor = nn.Sequential(
            nn.Conv2d(in_channels, 6, 5),  # (B, 6, 28, 28)
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(6, 16, 5),  # (B, 16, 10, 10)
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),  # (B, 400)
        )
        self.classifier = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes)
        )


class VGG16(Expert):
    """VGG-16 "D" without batch normalization for 32x32 images (PFL-MoE); 15,245,130 parameters.

    Initial convolution weights come from N(0, sqrt(2 / (k * k * out_channels))); biases start at 0.

    Args:
        in_channels: channels of the input, shape (B, in_channels, 32, 32).
        num_classes: number of outputs.
        dropout: dropout probability before each of the first two linear layers.
    """

    _WIDTHS = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")

    def __init__(self, in_channels: int = 3, num_classes: int = 10, dropout: float = 0.5) -> None:
        super().__init__(locals())
        self.input_shape = (in_channels, 32, 32)
        layers: list[nn.Module] = []
        channels = in_channels
        for width in self._WIDTHS:
            if isinstance(width, str):
                layers.insert(-1, nn.MaxPool2d(2))  # before the ReLU, see two_convolutions
            else:
                layers += [FanOutConv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
        self.extractor = nn.Sequential(*layers, nn.Flatten())  # (B, 512)
        self.classifier = nn.Sequential(
            nn.Dropout(dropout),
            nn.Linear(512, 512),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(512, 512),
            nn.ReLU(inplace=True),
            nn.Linear(512, num_classes),
        )
