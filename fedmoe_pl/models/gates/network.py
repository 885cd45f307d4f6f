"""Gates that are networks, as in Listo Zec et al. and Adaptive Expert Models."""

from __future__ import annotations

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from fedmoe_pl.checks import MOST_EXPERTS, MOST_UNITS, check_at_least, check_sizes
from fedmoe_pl.models.gates.gate import Gate
from fedmoe_pl.models.layers import SmallBiasLinear, XavierConv2d, check_dropout, pooled_size


class NetworkGate(Gate):
    """A network that reads the input.

    A network with one output is the gate of two experts: its sigmoid is the weight of the **local** expert (Listo Zec
    et al. 2020; Isaksson et al. 2022 for two experts). With more outputs, their softmax gives the weights of as many
    experts (Isaksson et al. 2022).

    Args:
        network: maps inputs (B, ...) to (B, 1), or to (B, experts) with the local expert last.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        """Weights (B, experts); (B, 2) for a network with one output."""
        logits = self.network(x)
        if logits.shape[1] == 1:
            return torch.cat((-logits, logits), dim=1).sigmoid()  # 1 - sigmoid(z) = sigmoid(-z)
        return logits.softmax(dim=1)


class GateCNN(nn.Module):
    """Gate network of Adaptive Expert Models (Isaksson et al. 2022, Table 1), for use in a ``NetworkGate``.

    With the default arguments it has 6,995 parameters. Initial parameters are drawn as in
    :class:`~fedmoe_pl.models.experts.leaf_cnn.LEAFCNN`.

    Args:
        in_channels: channels of the input, shape (B, in_channels, image_size, image_size).
        num_experts: number of experts, including the local one, at least 2; for two, the network has a single output.
        conv1_channels: width of the first convolution.
        conv2_channels: width of the second convolution; 0 for none.
        hidden: width of the hidden linear layer.
        dropout: probability of dropping a channel of the second convolution, and a hidden unit.
        relu_logits: whether negative logits become 0, as in the official code but not in the paper.
        image_size: height and width of the input in pixels.

    Raises:
        MisconfigurationException: if there are fewer than 2 experts, the image is too small, or ``dropout`` is not in
            [0, 1).
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_experts: int = 7,
        conv1_channels: int = 12,
        conv2_channels: int = 12,
        hidden: int = 8,
        dropout: float = 0.78,
        relu_logits: bool = False,
        image_size: int = 32,
    ) -> None:
        super().__init__()
        check_sizes(self, in_channels=in_channels, conv1_channels=conv1_channels, hidden=hidden, image_size=image_size)
        check_at_least(self, "conv2_channels", conv2_channels, 0, MOST_UNITS)
        if not 2 <= num_experts <= MOST_EXPERTS:
            raise MisconfigurationException(
                f"GateCNN: num_experts is {num_experts}, but must be at least 2, including the local expert, and at "
                f"most {MOST_EXPERTS:,}."
            )
        check_dropout(self, dropout)
        size = pooled_size(self, image_size, times=2 if conv2_channels else 1)
        self.in_channels = in_channels
        self.num_experts = num_experts
        self.conv1_channels = conv1_channels
        self.conv2_channels = conv2_channels
        self.hidden = hidden
        self.dropout = dropout
        self.relu_logits = relu_logits
        self.image_size = image_size
        self.input_shape = (in_channels, image_size, image_size)
        layers: list[nn.Module] = [XavierConv2d(in_channels, conv1_channels, 5), nn.MaxPool2d(2), nn.ReLU()]
        if conv2_channels:
            second = XavierConv2d(conv1_channels, conv2_channels, 5)
            layers += [second, nn.Dropout2d(dropout), nn.MaxPool2d(2), nn.ReLU()]
        layers += [nn.Flatten(), SmallBiasLinear((conv2_channels or conv1_channels) * size**2, hidden), nn.ReLU()]
        layers += [nn.Dropout(dropout), SmallBiasLinear(hidden, 1 if num_experts == 2 else num_experts)]
        self.layers = nn.Sequential(*layers, nn.ReLU() if relu_logits else nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        """Logits (B, num_experts), or (B, 1) for two experts."""
        return self.layers(x)
