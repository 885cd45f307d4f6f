"""Gates that are networks: of Listo Zec et al., Adaptive Expert Models, PM-MoE and pFedMoE."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedmoe_pl.models.gates.gate import Gate
from fedmoe_pl.models.layers import SmallBiasLinear, XavierConv2d, keep_arguments, pooled_size
from fedmoe_pl.models.normalization import SwitchNorm1d


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
    :class:`~fedmoe_pl.models.experts.adaptive.LEAFCNN`.

    Args:
        in_channels: channels of the input, shape (B, in_channels, image_size, image_size).
        num_experts: number of experts, including the local one, at least 2; for two, the network has a single output.
        conv1_channels: width of the first convolution.
        conv2_channels: width of the second convolution; None for none.
        hidden: width of the hidden linear layer.
        dropout: probability of dropping a channel of the second convolution, and a hidden unit.
        relu_logits: whether negative logits become 0, as in the official code but not in the paper.
        image_size: height and width of the input in pixels.
    """

    def __init__(
        self,
        in_channels: int = 3,
        num_experts: int = 7,
        conv1_channels: int = 12,
        conv2_channels: int | None = 12,
        hidden: int = 8,
        dropout: float = 0.78,
        relu_logits: bool = False,
        image_size: int = 32,
    ) -> None:
        super().__init__()
        keep_arguments(self, locals())
        size = pooled_size(image_size, times=2 if conv2_channels else 1)
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


class MLPGate(Gate):
    """A perceptron and a softmax (PM-MoE, Feng et al., WWW 2025; widths, activations and dropout from its code).

    The weights of all layers start orthogonal. Where the first input sets the first layer's width, this is so only
    after ``reset_parameters``, which ``PMMoE`` calls for each client.

    Args:
        num_experts: number of experts to weigh.
        in_features: number of values that the gate reads per sample; None to take it from the first input.
        reads_features: whether it reads the features of the mixture's extractor instead of the input.
        dropout: dropout probability after each hidden layer.
    """

    def __init__(
        self, num_experts: int, in_features: int | None = None, reads_features: bool = True, dropout: float = 0.1
    ) -> None:
        super().__init__()
        keep_arguments(self, {"num_experts": num_experts, "reads_features": reads_features, "dropout": dropout})
        first = nn.LazyLinear(128) if in_features is None else nn.Linear(in_features, 128)
        layers: list[nn.Module] = [first, nn.ReLU(), nn.Dropout(dropout)]
        for size_in, size_out in ((128, 256), (256, 128)):
            layers += [nn.Linear(size_in, size_out), nn.LeakyReLU(), nn.Dropout(dropout)]
        self.layers = nn.Sequential(*layers, nn.Linear(128, num_experts))
        if in_features is not None:
            self.reset_parameters()

    @property
    def in_features(self) -> int | None:
        """Number of values that the gate reads per sample; None until a lazy gate has read its first input."""
        return self.layers[0].in_features or None  # pyright: ignore[reportReturnType]

    def reset_parameters(self) -> None:
        """Draws all parameters anew, with orthogonal weights."""
        super().reset_parameters()
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.orthogonal_(layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Weights (B, num_experts), the softmax of the last layer's outputs."""
        return self.layers(x.flatten(1)).softmax(1)


class SwitchNormGate(Gate):
    """Gate of pFedMoE (Yi et al. 2024, https://arxiv.org/abs/2402.01350); 160,004 parameters by default.

    In that paper it weighs the representations of the global and the local expert. In train mode it uses batch
    statistics: a sample's weights depend on its batch, which must have more than one sample.

    Args:
        in_features: number of values per input, at least 2.
        hidden: width of the hidden layer, which the paper does not give.
        momentum: share of the old running statistics in the new ones in ``SwitchNorm1d``, from 0 to 1.
    """

    def __init__(self, in_features: int = 3072, hidden: int = 50, momentum: float = 0.9) -> None:
        super().__init__()
        keep_arguments(self, {"in_features": in_features, "hidden": hidden})
        self.momentum = momentum
        self.layers = nn.Sequential(
            nn.Flatten(),  # (B, in_features)
            SwitchNorm1d(in_features, momentum),
            nn.Linear(in_features, hidden),
            nn.BatchNorm1d(hidden),
            nn.Sigmoid(),
            nn.Linear(hidden, 2),
            nn.BatchNorm1d(2),
            nn.Softmax(dim=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Weights (B, 2) = (global expert, local expert) of inputs (B, ...)."""
        return self.layers(x)
