"""The network of FedMoE-DA, whole and in two parts."""

from __future__ import annotations

from torch import Tensor, nn

from fedmoe_pl.models.experts.expert import Expert
from fedmoe_pl.models.layers import keep_arguments, pooled_size, two_convolutions


class FedAvgCNN(Expert):
    """Two convolutions and two linear layers, the network used here for FedMoE-DA (Zhan et al. 2024).

    The paper gives no widths. The widths and the name of this network come from PFLlib. It has 878,538 parameters for
    CIFAR-10 and 582,026 for images of shape 1x28x28.

    Args:
        in_channels: channels of the input, shape (B, in_channels, image_size, image_size).
        num_classes: number of outputs.
        image_size: height and width of the input in pixels.
    """

    def __init__(self, in_channels: int = 3, num_classes: int = 10, image_size: int = 32) -> None:
        super().__init__(locals())
        size = pooled_size(image_size)
        self.input_shape = (in_channels, image_size, image_size)
        self.extractor = two_convolutions(in_channels, 32, 64)
        self.classifier = nn.Sequential(nn.Linear(64 * size**2, 512), nn.ReLU(), nn.Linear(512, num_classes))


class ConvBlock(nn.Module):
    """The first block of ``FedAvgCNN``: 5x5 convolution, ReLU, 2x2 pooling; the embedding of FedMoE-DA.

    It has 2,432 parameters for CIFAR-10. Its ``output_shape`` is the ``input_shape`` of the experts.

    Args:
        in_channels: channels of the input, shape (B, in_channels, image_size, image_size).
        out_channels: channels of the output.
        image_size: height and width of the input in pixels.
    """

    def __init__(self, in_channels: int = 3, out_channels: int = 32, image_size: int = 32) -> None:
        super().__init__()
        keep_arguments(self, locals())
        size = pooled_size(image_size, times=1)
        self.input_shape = (in_channels, image_size, image_size)
        self.output_shape = (out_channels, size, size)
        self.layers = nn.Sequential(nn.Conv2d(in_channels, out_channels, 5), nn.MaxPool2d(2), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        """Values of shape ``(B, *output_shape)``."""
        return self.layers(x)


class ConvExpert(Expert):
    """The part of ``FedAvgCNN`` after the :class:`ConvBlock`: an expert of FedMoE-DA.

    It has 876,106 parameters for CIFAR-10. Its ``extractor`` is the second block, its ``classifier`` the two linear
    layers.

    Args:
        in_channels: channels of the input, shape (B, in_channels, image_size, image_size).
        num_classes: number of outputs.
        image_size: height and width of the input: 14 after a ``ConvBlock`` for 32 pixels, 12 after one for 28.
        channels: channels of the convolution.
        hidden: width of the hidden linear layer.
    """

    def __init__(
        self, in_channels: int = 32, num_classes: int = 10, image_size: int = 14, channels: int = 64, hidden: int = 512
    ) -> None:
        super().__init__(locals())
        self.input_shape = (in_channels, image_size, image_size)
        size = pooled_size(image_size, times=1)
        self.extractor = nn.Sequential(
            nn.Conv2d(in_channels, channels, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()
        )  # (B, channels * size * size)
        self.classifier = nn.Sequential(
            nn.Linear(channels * size**2, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)
        )
