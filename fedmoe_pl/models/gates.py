"""Gates: for every sample, a gate computes the weights of the experts.

A gate returns weights of shape (B, experts) that are at least 0, add up to 1 and, in eval mode, do not depend on the
other samples of a batch. A federation tries this before training; without one, it is tried only if the expert that
reads the inputs has an ``input_shape``. Global experts always come first and the local one last, whatever the order in
a paper: of two experts, index 0 is the global one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from fedmoe_pl.checks import InvalidArgumentError, check_kind
from fedmoe_pl.models.inputs import Inputs, batch_size_of, call, first_tensor
from fedmoe_pl.models.layers import (
    SmallBiasLinear,
    SwitchNorm1d,
    XavierConv2d,
    draw_anew,
    keep_arguments,
    layer_without_reset,
    pooled_size,
)


class Gate(nn.Module, ABC):
    """The base of all gates.

    Attributes:
        reads_features: whether the gate reads the features of the global expert's extractor instead of the input.
    """

    reads_features: bool = False

    @abstractmethod
    def forward(self, x: Any) -> Tensor:
        """Weights of shape (B, experts), the local expert's last.

        Args:
            x: the input (B, ...), a dict if batches are dicts, or the features (B, F) if ``reads_features`` is set. In
                the task ``causal_lm``, B are the tokens of all texts, and features those of the text up to a token.
        """

    def reset_parameters(self) -> None:
        """Draws new initial parameters for all layers, as PFL-MoE does for every client.

        Override it in a gate that has parameters beside those of its layers.
        """
        for part in self.children():
            draw_anew(part)

    def part_without_reset(self) -> nn.Module | None:
        """The first part that has parameters which :meth:`reset_parameters` does not draw; None if there is none."""
        if type(self).reset_parameters is not Gate.reset_parameters:
            return None
        parts = [self] if [*self.parameters(recurse=False)] else map(layer_without_reset, self.children())
        return next(filter(None, parts), None)


def checked_gate(owner: object, gate: Gate | None) -> Gate:
    """The gate, or ``EqualWeights`` for None; refuses what is no gate, such as a bare network."""
    check_kind(owner, "gate", gate, Gate, ", such as ConstantGate(0.5), or NetworkGate(network) of a network")
    return EqualWeights() if gate is None else gate


class FixedGate(Gate):
    """A gate that gives every sample the same weights, which no optimizer trains.

    The mixture sets the number of experts; until then it is 2.

    Attributes:
        weights: the weight of each expert, a list or a tensor, from 0 to 1; they add up to 1.
    """

    weights: Any

    def __init__(self) -> None:
        super().__init__()
        self.fit_to(2)

    @abstractmethod
    def fit_to(self, num_experts: int) -> None:
        """Sets the weights for a number of experts, unless the gate was constructed with its weights."""

    @property
    def active(self) -> list[int]:
        """Indices of the experts whose weight is above 0."""
        return [index for index, weight in enumerate(self.weights) if weight > 0]

    def forward(self, x: Inputs) -> Tensor:
        """The same weights (B, experts) for every sample; in the default precision if samples are integers."""
        x = first_tensor(x)
        dtype = x.dtype if x.is_floating_point() else torch.get_default_dtype()
        return torch.cat([x.new_full((1,), weight, dtype=dtype) for weight in self.weights]).expand(x.shape[0], -1)


class GlobalOnly(FixedGate):
    """Uses only the first expert: the global one, or the first cluster's."""

    def fit_to(self, num_experts: int) -> None:
        """Gives the first expert the weight 1."""
        self.weights = [1.0] + [0.0] * (num_experts - 1)


class LocalOnly(FixedGate):
    """Uses only the last expert, which is the local one if there is one."""

    def fit_to(self, num_experts: int) -> None:
        """Gives the last expert the weight 1."""
        self.weights = [0.0] * (num_experts - 1) + [1.0]


class EqualWeights(FixedGate):
    """Gives all experts the same weight."""

    def fit_to(self, num_experts: int) -> None:
        """Gives each expert the same weight."""
        self.weights = [1 / num_experts] * num_experts


class MixtureWeights(FixedGate):
    """Weights that an algorithm estimates for every client, such as the pi of FedEM (Marfoq et al. 2021).

    They are a buffer, ``gate.weights``: no optimizer trains them, but a client can keep them, and checkpoints have
    them. They start equal.

    Attributes:
        weights: shape (experts,); an algorithm may replace them, as long as they are at least 0 and add up to 1.
    """

    weights: Tensor

    @property
    def active(self) -> list[int]:
        """Indices of all experts, because the weights differ between clients and rounds."""
        return [*range(len(self.weights))]

    def fit_to(self, num_experts: int) -> None:
        """Gives each expert the same weight, if their number is another one than before."""
        old = self._buffers.get("weights")
        if old is None or num_experts != len(old):
            new = (torch.empty(0) if old is None else old).new_full((num_experts,), 1 / num_experts)
            self.register_buffer("weights", new)

    def forward(self, x: Inputs) -> Tensor:
        """The same weights (B, experts) for every sample."""
        return self.weights.expand(batch_size_of(x), -1)


class ConstantGate(FixedGate):
    """A gate with any constant weights; common cases are ``GlobalOnly``, ``LocalOnly`` and ``EqualWeights``.

    Args:
        weight: for two experts, the weight of the global one, from 0 to 1; or a list of all weights, which add up to 1,
            the local expert's last.
    """

    def __init__(self, weight: float | list[float] = 0.5) -> None:
        super().__init__()
        weight = [*weight] if isinstance(weight, tuple) else weight
        weights: list[float] = weight if isinstance(weight, list) else [weight, 1 - weight]
        if not (weights and all(0 <= value <= 1 for value in weights) and abs(sum(weights) - 1) < 1e-6):
            raise InvalidArgumentError(self, "weight", weight, "from 0 to 1, or a list of such numbers whose sum is 1")
        self.weight = weight
        self.weights = weights

    def fit_to(self, num_experts: int) -> None:
        """Keeps the weights; a mixture with another number of experts refuses the gate."""


class _SigmoidGate(Gate):
    """A linear layer and a sigmoid; if the layer's width is None, the first input sets it."""

    def __init__(self, in_features: int | None = None) -> None:
        super().__init__()
        self.linear = nn.LazyLinear(1) if in_features is None else nn.Linear(in_features, 1)

    @property
    def in_features(self) -> int | None:
        """Number of values that the gate reads per sample; None until a lazy gate has read its first input."""
        return self.linear.in_features or None

    def forward(self, x: Tensor) -> Tensor:
        """Weights (B, 2) = (g, 1 - g), g = sigmoid(linear(x))."""
        logit = self.linear(_flattened(self, x))  # (B, 1)
        return torch.cat((logit, -logit), dim=1).sigmoid()  # 1 - sigmoid(z) = sigmoid(-z)


class LinearGate(_SigmoidGate):
    """Gate of PFL-MF: a linear layer on the flattened input (PFL-MoE, section III).

    Args:
        in_features: number of values per input; None to take it from the first input.
    """


class FeatureGate(_SigmoidGate):
    """Gate of PFL-MFE: a linear layer on the features of the global expert's extractor (PFL-MoE, section III).

    Args:
        in_features: number of features; None to take it from the first input.
    """

    reads_features = True


class ProxyGate(Gate):
    """Gate of FedMoE-DA (Zhan et al. 2024, Eq. 1): a linear layer without bias and a softmax.

    An expert's proxy is its column of the layer's matrix in the paper. Here each proxy is a separate layer,
    ``gate.proxies.<expert>``, with the initial values of ``torch.nn.Linear``.

    Args:
        num_experts: number of experts.
        in_features: number of values per sample; None to take it from the first input.
    """

    def __init__(self, num_experts: int = 4, in_features: int | None = None) -> None:
        super().__init__()

        def proxy() -> nn.Linear:
            return nn.LazyLinear(1, bias=False) if in_features is None else nn.Linear(in_features, 1, bias=False)

        self.proxies = nn.ModuleList(proxy() for _ in range(num_experts))

    @property
    def num_experts(self) -> int:
        """Number of experts."""
        return len(self.proxies)

    @property
    def in_features(self) -> int | None:
        """Number of values that the gate reads per sample; None until a lazy gate has read its first input."""
        return self.proxies[0].in_features or None  # pyright: ignore[reportReturnType]

    def forward(self, x: Tensor) -> Tensor:
        """Weights (B, experts) of inputs (B, ...)."""
        x = _flattened(self, x)
        return torch.cat([proxy(x) for proxy in self.proxies], dim=1).softmax(dim=1)


class NetworkGate(Gate):
    """A network that reads the input.

    A network with one output is the gate of two experts: its sigmoid is the weight of the **local** expert (Listo Zec
    et al. 2020; Isaksson et al. 2022 for two experts). With more outputs, their softmax gives the weights of as many
    experts (Isaksson et al. 2022).

    Args:
        network: maps inputs (B, ...) to (B, 1), or to (B, experts) with the local expert last. The values of a dict
            are its keyword arguments.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Inputs) -> Tensor:
        """Weights (B, experts); (B, 2) for a network with one output."""
        logits = call(self.network, x)
        if logits.shape[1] == 1:
            return torch.cat((-logits, logits), dim=1).sigmoid()  # 1 - sigmoid(z) = sigmoid(-z)
        return logits.softmax(dim=1)


class GateCNN(nn.Module):
    """Gate network of Adaptive Expert Models (Isaksson et al. 2022, Table 1), for use in a ``NetworkGate``.

    With the default arguments it has 6,995 parameters. Initial parameters are drawn as in
    :class:`~fedmoe_pl.models.experts.LEAFCNN`.

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
        size = pooled_size(self, image_size, times=2 if conv2_channels else 1)
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
        return self.layers(_flattened(self, x)).softmax(1)


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
        self.in_features, self.hidden, self.momentum = in_features, hidden, momentum
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
        return self.layers(_flattened(self, x))


def _flattened(gate: Gate, x: Inputs) -> Tensor:
    """The values of each sample, (B, F), in the gate's type; refuses what a linear layer cannot read."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        reason = "inputs are integers" if isinstance(x, Tensor) else "batches are dicts"
        allowed = "NetworkGate, one of your own that reads them, or a fixed one"
        raise InvalidArgumentError("MixtureOfExperts", "gate", gate, allowed, reason)
    x = x.flatten(1).to(next(gate.parameters()).dtype)  # a base in half precision may have a gate in float32
    if gate.in_features not in (None, x.shape[1]):
        what = "features" if gate.reads_features else "values of an input"
        raise InvalidArgumentError(gate, "in_features", gate.in_features, f"{x.shape[1]}, the number of {what}")
    return x
