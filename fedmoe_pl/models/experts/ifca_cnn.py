"""The expert of Adaptive Expert Models for rotated images."""

from __future__ import annotations

from torch import Tensor, nn

from fedmoe_pl.checks import check_sizes
from fedmoe_pl.models.layers import SmallBiasLinear, XavierConv2d, check_dropout


class IFCACNN(nn.Module):
    """CNN of IFCA as in Adaptive Expert Models (Isaksson et al. 2022), for rotated CIFAR-10; 798,752 parameters.

    The last hidden layer has 194 units, as in that paper's official code; the original network has 192. Initial
    parameters are drawn as in :class:`~fedmoe_pl.models.experts.leaf_cnn.LEAFCNN`.

    Args:
        in_channels: channels of the input, shape (B, in_channels, 32, 32).
        num_classes: number of outputs.
        dropout: dropout probability after the first linear layer.
        relu_logits: whether negative logits become 0, as in the official code but not in the paper.

    Raises:
        MisconfigurationException: if ``dropout`` is not in [0, 1).
    """

    def __init__(
        self, in_channels: int = 3, num_classes: int = 10, dropout: float = 0.5, relu_logits: bool = False
    ) -> None:
        super().__init__()
        check_sizes(self, in_channels=in_channels, num_classes=num_classes)
        check_dropout(self, dropout)
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.dropout = dropout
        self.relu_logits = relu_logits
        self.input_shape = (in_channels, 32, 32)
        self.extractor = nn.Sequential(
            XavierConv2d(in_channels, 64, 5),  # (B, 64, 28, 28)
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.LocalResponseNorm(4, alpha=0.001 / 9),
            XavierConv2d(64, 64, 5),  # (B, 64, 10, 10)
            nn.ReLU(),
            nn.LocalResponseNorm(4, alpha=0.001 / 9),
            nn.MaxPool2d(2),
            nn.Flatten(),  # (B, 1600)
        )
        self.classifier = nn.Sequential(
            SmallBiasLinear(1600, 384),
            nn.ReLU(),
            nn.Dropout(dropout),
            SmallBiasLinear(384, 194),
            nn.ReLU(),
            SmallBiasLinear(194, num_classes),
            nn.ReLU() if relu_logits else nn.Identity(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes)."""
        return self.classifier(self.extractor(x))
