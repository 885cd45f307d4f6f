"""VGG-16, an expert of PFL-MoE."""

from __future__ import annotations

from torch import Tensor, nn

from fedmoe_pl.checks import check_sizes
from fedmoe_pl.models.layers import FanOutConv2d, check_dropout


class VGG16(nn.Module):
    """VGG-16 "D" without batch normalization for 32x32 images (PFL-MoE); 15,245,130 parameters.

    Initial convolution weights come from N(0, sqrt(2 / (k * k * out_channels))); biases start at 0.

    Args:
        in_channels: channels of the input, shape (B, in_channels, 32, 32).
        num_classes: number of outputs.
        dropout: dropout probability before each of the first two linear layers.
    """

    _WIDTHS = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")

    def __init__(self, in_channels: int = 3, num_classes: int = 10, dropout: float = 0.5) -> None:
        super().__init__()
        check_sizes(self, in_channels=in_channels, num_classes=num_classes)
        check_dropout(self, dropout)
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.dropout = dropout
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

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes)."""
        return self.classifier(self.extractor(x))
