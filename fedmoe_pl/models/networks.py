"""Convolutional experts of pFedMoE, Adaptive Expert Models, Listo Zec et al. and FedMoE-DA.

Like the experts of PFL-MoE (``experts.py``): an ``extractor``, a ``classifier`` and
``forward(x) == classifier(extractor(x))``; constructor arguments are kept as attributes of the same name.
Convolutions are 5x5 without padding. Layer by layer in METHODS section 3.
"""

from __future__ import annotations

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from fedmoe_pl.models.layers import SmallBiasLinear, XavierConv2d, check_dropout, pooled_size


class CNN(nn.Module):
    """CNN-1 to CNN-5 of pFedMoE (Yi et al. 2024, https://arxiv.org/abs/2402.01350; METHODS section 3).

    The ``extractor`` gives a representation of 500 values for all five, the ``classifier`` is the header on it.
    CNN-4 has the widths in the paper, which do not fit the model size printed beside them.

    Args:
        variant: 1 to 5 for CNN-1 to CNN-5; 2,621,558, 1,815,142, 1,320,558, 1,060,358 and 670,058 parameters.
        in_channels: channels of the input, shape (B, in_channels, 32, 32).
        num_classes: number of outputs.

    Raises:
        MisconfigurationException: if there is no such variant.
    """

    _WIDTHS = ((32, 2000), (16, 2000), (32, 1000), (32, 800), (32, 500))  # of conv2 and fc1

    def __init__(self, variant: int = 1, in_channels: int = 3, num_classes: int = 10) -> None:
        super().__init__()
        if variant not in (1, 2, 3, 4, 5):
            raise MisconfigurationException(f"CNN's init_args.variant is {variant}, but must be 1, 2, 3, 4 or 5.")
        self.variant = variant
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.input_shape = (in_channels, 32, 32)
        channels, hidden = self._WIDTHS[variant - 1]
        self.extractor = nn.Sequential(
            nn.Conv2d(in_channels, 16, 5),  # (B, 16, 28, 28)
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, channels, 5),  # (B, channels, 10, 10)
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),  # (B, channels * 25)
            nn.Linear(channels * 25, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 500),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(500, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes)."""
        return self.classifier(self.extractor(x))


class LEAFCNN(nn.Module):
    """CNN of LEAF with dropout (Adaptive Expert Models, Isaksson et al. 2022, Table 1; METHODS section 3).

    The default is the paper's global expert for CIFAR-10, with 942,634 parameters; its local expert has 32 and 256
    channels, 256 hidden units and dropout 0.76. Convolutions start from Xavier's uniform distribution, biases of
    linear layers at 0.01, as in the official code.

    Args:
        in_channels: channels of the input, shape (B, in_channels, image_size, image_size).
        num_classes: number of outputs.
        conv1_channels: width of the first convolution.
        conv2_channels: width of the second convolution.
        hidden: width of the hidden linear layer.
        dropout: dropout probability behind the hidden layer.
        relu_logits: whether logits below 0 become 0, as in the official code but not in the paper.
        image_size: height and width of the input in pixels; 28 for FEMNIST.

    Raises:
        MisconfigurationException: if the image is too small, or dropout is no probability below 1.
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
        self.extractor = _two_convolutions(in_channels, conv1_channels, conv2_channels, XavierConv2d)
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


class IFCACNN(nn.Module):
    """CNN of IFCA as Adaptive Expert Models has it for rotated CIFAR-10: 798,752 parameters (METHODS section 3).

    The last hidden layer has 194 units, as in that paper's official code; the network it goes back to has 192. Initial
    parameters as in :class:`LEAFCNN`.

    Args:
        in_channels: channels of the input, shape (B, in_channels, 32, 32).
        num_classes: number of outputs.
        dropout: dropout probability behind the first linear layer.
        relu_logits: whether logits below 0 become 0, as in the official code but not in the paper.

    Raises:
        MisconfigurationException: if dropout is no probability below 1.
    """

    def __init__(
        self, in_channels: int = 3, num_classes: int = 10, dropout: float = 0.5, relu_logits: bool = False
    ) -> None:
        super().__init__()
        check_dropout(self, dropout)
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.dropout = dropout
        self.relu_logits = relu_logits
        self.input_shape = (in_channels, 32, 32)
        self.extractor = nn.Sequential(
            XavierConv2d(in_channels, 64, 5),  # (B, 64, 28, 28)
            nn.ReLU(),
            nn.MaxPool2d(2),
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


class TwoConvCNN(nn.Module):
    """LeNet-5 with dropout (Listo Zec et al. 2020, https://arxiv.org/abs/2010.02056; METHODS section 3).

    62,006 parameters for CIFAR-10 and 44,426 for Fashion-MNIST. The official code has widths 6, 12, 84 and 42 for
    Fashion-MNIST. With ``num_classes=1`` it is the paper's gate, in a ``NetworkGate``.

    Args:
        in_channels: channels of the input, shape (B, in_channels, image_size, image_size).
        num_classes: number of outputs.
        image_size: height and width of the input in pixels; 28 for Fashion-MNIST.
        dropout: dropout probability behind the first linear layer, in the official code but not in the paper.
        conv1_channels: width of the first convolution.
        conv2_channels: width of the second convolution.
        hidden1: width of the first linear layer.
        hidden2: width of the second linear layer.

    Raises:
        MisconfigurationException: if the image is too small, or dropout is no probability below 1.
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
        self.extractor = _two_convolutions(in_channels, conv1_channels, conv2_channels)
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


class FedAvgCNN(nn.Module):
    """Two convolutions and two linear layers, the network taken for FedMoE-DA (Zhan et al. 2024).

    That paper gives no widths; these are PFLlib's, and so is the name (METHODS section 3): 878,538 parameters for
    CIFAR-10, 582,026 for images of 1x28x28.

    Args:
        in_channels: channels of the input, shape (B, in_channels, image_size, image_size).
        num_classes: number of outputs.
        image_size: height and width of the input in pixels.

    Raises:
        MisconfigurationException: if the image is too small.
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 10, image_size: int = 32) -> None:
        super().__init__()
        size = pooled_size(self, image_size)
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.image_size = image_size
        self.input_shape = (in_channels, image_size, image_size)
        self.extractor = _two_convolutions(in_channels, 32, 64)
        self.classifier = nn.Sequential(nn.Linear(64 * size**2, 512), nn.ReLU(), nn.Linear(512, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes)."""
        return self.classifier(self.extractor(x))


def _two_convolutions(
    in_channels: int, conv1_channels: int, conv2_channels: int, convolution: type[nn.Conv2d] = nn.Conv2d
) -> nn.Sequential:
    return nn.Sequential(
        convolution(in_channels, conv1_channels, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        convolution(conv1_channels, conv2_channels, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
    )
