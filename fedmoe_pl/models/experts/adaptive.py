"""The networks of Adaptive Expert Models."""

from __future__ import annotations

from torch import nn

from fedmoe_pl.models.experts.expert import Expert
from fedmoe_pl.models.layers import SmallBiasLinear, XavierConv2d, pooled_size, two_convolutions


class LEAFCNN(Expert):
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
        super().__init__(locals())
        size = pooled_size(image_size)
        self.input_shape = (in_channels, image_size, image_size)
        self.extractor = two_convolutions(in_channels, conv1_channels, conv2_channels, XavierConv2d)
        self.classifier = nn.Sequential(
            SmallBiasLinear(conv2_channels * size**2, hidden),
            nn.ReLU(),
            nn.Dropout(dropout),
            SmallBiasLinear(hidden, num_classes),
            nn.ReLU() if relu_logits else nn.Identity(),
        )


class IFCACNN(Expert):
    """CNN of IFCA as in Adaptive Expert Models (Isaksson et al. 2022), for rotated CIFAR-10; 798,752 parameters.

    The last hidden layer has 194 units, as in that paper's official code; the original network has 192. Initial
    parameters are drawn as in :class:`~fedmoe_pl.models.experts.adaptive.LEAFCNN`.

    Args:
        in_channels: channels of the input, shape (B, in_channels, 32, 32).
        num_classes: number of outputs.
        dropout: dropout probability after the first linear layer.
        relu_logits: whether negative logits become 0, as in the official code but not in the paper.
    """

    def __init__(
        self, in_channels: int = 3, num_classes: int = 10, dropout: float = 0.5, relu_logits: bool = False
    ) -> None:
        super().__init__(locals())
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
