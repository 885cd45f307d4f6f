"""The expert of Adaptive Expert Models."""

from __future__ import annotations

from torch import Tensor, nn

from fedmoe_pl.checks import check_sizes
from fedmoe_pl.models.layers import SmallBiasLinear, XavierConv2d, check_dropout, pooled_size, two_convolutions


class LEAFCNN(nn.Module):
    """CNN of LEAF with dropout (Adaptive Expert Models, Isaksson et al. 2022, Table 1).

    The default is the paper's global expert for CIFAR-10, with 942,634 parameters; its local expert has 32 and 256
    channels, 256 hidden units and dropout 0.76. As in the official code, initial weights of convolutions come from
    Xavier's uniform distribution, and biases of linear layers start at 0.01.

    Args:
        in_channels: channels of the input, shape (B, in_channels, image_size, image_size).
        num_classes: number of outputs.
        conv1_channels: width of the first convolution.
        conv2_channels: width of the second convolution.
        hidden: width of the hidden linear layer.
        dropout: dropout probability after the hidden layer.
        relu_logits: whether negative logits become 0, as in the official code but not in the paper.
        image_size: height and width of the input in pixels; 28 for FEMNIST.

    Raises:
        MisconfigurationException: if the image is too small, or ``dropout`` is not in [0, 1).
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_classes: int = 10,
        conv1_channels: int = 128,
        conv2_channels: int = 32,
        hidden: int = 1024,
        dropout: float = 0.8,
        relu_logits: bool = False,
        image_size: int = 32,
    ) -> None:
        super().__init__()
        check_sizes(
            self,
            in_channels=in_channels,
            num_classes=num_classes,
            conv1_channels=conv1_channels,
            conv2_channels=conv2_channels,
            hidden=hidden,
            image_size=image_size,
        )
        check_dropout(self, dropout)
        size = pooled_size(self, image_size)
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.conv1_channels = conv1_channels
        self.conv2_channels = conv2_channels
        self.hidden = hidden
        self.dropout = dropout
        self.relu_logits = relu_logits
        self.image_size = image_size
        self.input_shape = (in_channels, image_size, image_size)
        self.extractor = two_convolutions(in_channels, conv1_channels, conv2_channels, XavierConv2d)
        self.classifier = nn.Sequential(
            SmallBiasLinear(conv2_channels * size**2, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            SmallBiasLinear(hidden, num_classes),
            nn.ReLU() if relu_logits else nn.Identity(),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes)."""
        return self.classifier(self.extractor(x))
