"""The convolutional expert of Listo Zec et al."""

from __future__ import annotations

from torch import Tensor, nn

from fedmoe_pl.checks import check_sizes
from fedmoe_pl.models.layers import check_dropout, pooled_size, two_convolutions


class TwoConvCNN(nn.Module):
    """LeNet-5 with dropout (Listo Zec et al. 2020, https://arxiv.org/abs/2010.02056).

    It has 62,006 parameters for CIFAR-10 and 44,426 for Fashion-MNIST; there, the official code has the widths 6, 12,
    84 and 42. With ``num_classes=1``, in a ``NetworkGate``, it is the paper's gate.

    Args:
        in_channels: channels of the input, shape (B, in_channels, image_size, image_size).
        num_classes: number of outputs.
        image_size: height and width of the input in pixels; 28 for Fashion-MNIST.
        dropout: dropout probability after the first linear layer, in the official code but not in the paper.
        conv1_channels: width of the first convolution.
        conv2_channels: width of the second convolution.
        hidden1: width of the first linear layer.
        hidden2: width of the second linear layer.

    Raises:
        MisconfigurationException: if the image is too small, or ``dropout`` is not in [0, 1).
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 10,
        image_size: int = 32,
        dropout: float = 0.5,
        conv1_channels: int = 6,
        conv2_channels: int = 16,
        hidden1: int = 120,
        hidden2: int = 84,
    ) -> None:
        super().__init__()
        check_sizes(
            self,
            in_channels=in_channels,
            num_classes=num_classes,
            image_size=image_size,
            conv1_channels=conv1_channels,
            conv2_channels=conv2_channels,
            hidden1=hidden1,
            hidden2=hidden2,
        )
        check_dropout(self, dropout)
        size = pooled_size(self, image_size)
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.image_size = image_size
        self.dropout = dropout
        self.conv1_channels = conv1_channels
        self.conv2_channels = conv2_channels
        self.hidden1 = hidden1
        self.hidden2 = hidden2
        self.input_shape = (in_channels, image_size, image_size)
        self.extractor = two_convolutions(in_channels, conv1_channels, conv2_channels)
        self.classifier = nn.Sequential(
            nn.Linear(conv2_channels * size**2, hidden1),
            nn.ReLU(),
            nn.Dropout(dropout),
            nn.Linear(hidden1, hidden2),
            nn.ReLU(),
            nn.Linear(hidden2, num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes)."""
        return self.classifier(self.extractor(x))
