"""Networks of the papers, each split into an ``extractor`` and a ``classifier``.

They share a base, but the split is a convention: any ``nn.Module`` can be an expert. If it has these two attributes and
``forward(x) == classifier(extractor(x))``, its classifier can be personalized alone (PFL-FB), and a gate can read its
features (PFL-MFE). Constructor arguments are kept as attributes of the same names, so that a checkpoint can rebuild the
expert; a mixture uses ``input_shape`` to size lazy gates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fedmoe_pl.checks import InvalidArgumentError
from fedmoe_pl.models.layers import (
    FanOutConv2d,
    SmallBiasLinear,
    XavierConv2d,
    keep_arguments,
    pooled_size,
    two_convolutions,
)


def check_split(owner: object, argument: str, expert: nn.Module, because: str) -> None:
    """Refuses an expert that has no extractor and classifier."""
    if not (hasattr(expert, "extractor") and hasattr(expert, "classifier")):
        raise InvalidArgumentError(owner, argument, expert, "one with an extractor and a classifier", because)


class Expert(nn.Module):
    """A network of an ``extractor`` and a ``classifier``; the arguments are the locals of a subclass's constructor."""

    if TYPE_CHECKING:  # TorchScript does not take annotations of modules
        extractor: nn.Module
        classifier: nn.Module

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        super().__init__()
        keep_arguments(self, arguments)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes), or (B, num_classes, ...) of dense outputs."""
        return self.classifier(self.extractor(x))


class LeNet5(Expert):
    """LeNet-5 with ReLU and max pooling (PFL-MoE); 61,706 parameters with one input channel.

    Args:
        in_channels: channels of the input, shape (B, in_channels, 32, 32).
        num_classes: number of outputs.

    Example:
        >>> sum(p.numel() for p in LeNet5(in_channels=3).parameters())
        62006
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 10) -> None:
        super().__init__(locals())
        self.input_shape = (in_channels, 32, 32)
        self.extractor = two_convolutions(in_channels, 6, 16)  # (B, 400)
        self.classifier = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes)
        )


class VGG16(Expert):
    """VGG-16 "D" without batch normalization for 32x32 images (PFL-MoE); 15,245,130 parameters.

    Initial convolution weights come from N(0, sqrt(2 / (k * k * out_channels))); biases start at 0.

    Args:
        in_channels: channels of the input, shape (B, in_channels, 32, 32).
        num_classes: number of outputs.
        dropout: dropout probability before each of the first two linear layers.
    """

    _WIDTHS = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")

    def __init__(self, in_channels: int = 3, num_classes: int = 10, dropout: float = 0.5) -> None:
        super().__init__(locals())
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


class CNN(Expert):
    """CNN-1 to CNN-5 of pFedMoE (Yi et al. 2024, https://arxiv.org/abs/2402.01350).

    In all five, the ``extractor`` gives a representation of 500 values, and the ``classifier`` is pFedMoE's header.
    CNN-4 has the paper's widths, although they do not match the model size in the paper.

    Args:
        variant: 1 to 5 for CNN-1 to CNN-5, with 2,621,558, 1,815,142, 1,320,558, 1,060,358 and 670,058 parameters.
        in_channels: channels of the input, shape (B, in_channels, 32, 32).
        num_classes: number of outputs.
    """

    _WIDTHS: ClassVar = {1: (32, 2000), 2: (16, 2000), 3: (32, 1000), 4: (32, 800), 5: (32, 500)}  # of conv2 and fc1

    def __init__(self, variant: int = 1, in_channels: int = 3, num_classes: int = 10) -> None:
        super().__init__(locals())
        self.input_shape = (in_channels, 32, 32)
        channels, hidden = self._WIDTHS[variant]
        self.extractor = nn.Sequential(
            *two_convolutions(in_channels, 16, channels),  # (B, channels * 25)
            nn.Linear(channels * 25, hidden),
            nn.ReLU(),
            nn.Linear(hidden, 500),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(500, num_classes)


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
        size = pooled_size(self, image_size)
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
    parameters are drawn as in :class:`~fedmoe_pl.models.experts.LEAFCNN`.

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


class TwoConvCNN(Expert):
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
        super().__init__(locals())
        size = pooled_size(self, image_size)
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


class BiLSTM(Expert):
    """Bidirectional LSTM for AG News (Listo Zec et al. 2020); 1,085,708 parameters.

    It reads padding like any other token. With ``num_classes=1``, in a ``NetworkGate``, it is the paper's gate.

    Args:
        vocabulary_size: number of token ids, including those for unknown words and padding.
        embedding_dim: size of a token's embedding.
        hidden: units of the LSTM in each direction; the extractor gives twice as many features.
        num_classes: number of outputs.

    Attributes:
        input_dtype: token ids, shape (B, L), are int64; L may differ from batch to batch.
    """

    input_dtype = torch.int64

    def __init__(
        self, vocabulary_size: int = 10_002, embedding_dim: int = 100, hidden: int = 64, num_classes: int = 4
    ) -> None:
        super().__init__(locals())
        self.input_shape = (1,)
        self.extractor = _LastStates(vocabulary_size, embedding_dim, hidden)
        self.classifier = nn.Linear(2 * hidden, num_classes)


class _LastStates(nn.Module):
    """A bidirectional LSTM's final states: the forward one after the last token, the backward one after the first."""

    def __init__(self, vocabulary_size: int, embedding_dim: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, embedding_dim)
        self.lstm = nn.LSTM(embedding_dim, hidden, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        """Features (B, 2 * hidden) of token ids (B, L)."""
        _, (states, _) = self.lstm(self.embedding(x))  # (2, B, hidden)
        return torch.cat((states[0], states[1]), dim=1)


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
        size = pooled_size(self, image_size)
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
        size = pooled_size(self, image_size, times=1)
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
        size = pooled_size(self, image_size, times=1)
        self.extractor = nn.Sequential(
            nn.Conv2d(in_channels, channels, 5), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten()
        )  # (B, channels * size * size)
        self.classifier = nn.Sequential(
            nn.Linear(channels * size**2, hidden), nn.ReLU(), nn.Linear(hidden, num_classes)
        )


class SmallMLP(Expert):
    """A perceptron with two hidden layers for small inputs such as the 8x8 digits.

    Args:
        in_features: number of input values per sample; inputs of shape (B, ...) are flattened.
        hidden_features: width of both hidden layers; the first one's outputs are the features.
        num_classes: number of outputs.
    """

    def __init__(self, in_features: int = 64, hidden_features: int = 64, num_classes: int = 10) -> None:
        super().__init__(locals())
        self.input_shape = (in_features,)
        self.extractor = nn.Sequential(nn.Flatten(), nn.Linear(in_features, hidden_features), nn.ReLU())
        self.classifier = nn.Sequential(
            nn.Linear(hidden_features, hidden_features), nn.ReLU(), nn.Linear(hidden_features, num_classes)
        )


class RepresentationMLP(Expert):
    """A perceptron for small inputs; its representation and its hidden layer may differ in width, as in pFedMoE.

    Args:
        in_features: number of input values per sample; inputs of shape (B, ...) are flattened.
        hidden_features: width of the hidden layer, which may differ between architectures.
        representation_features: width of the representation, the same for all experts of a mixture.
        num_classes: number of outputs.
        batch_norm: whether the hidden layer has batch normalization before its ReLU, for FedBN.
    """

    def __init__(
        self,
        in_features: int = 64,
        hidden_features: int = 64,
        representation_features: int = 32,
        num_classes: int = 10,
        batch_norm: bool = False,
    ) -> None:
        super().__init__(locals())
        self.input_shape = (in_features,)
        self.extractor = nn.Sequential(
            nn.Flatten(),
            nn.Linear(in_features, hidden_features),
            *([nn.BatchNorm1d(hidden_features)] if batch_norm else []),
            nn.ReLU(),
            nn.Linear(hidden_features, representation_features),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(representation_features, num_classes)


class SmallFCN(Expert):
    """Three convolutions that keep height and width, for small images and dense prediction.

    Args:
        in_channels: channels of the images.
        num_classes: number of outputs of each pixel.
        channels: width of the first two convolutions, which are the extractor.
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 2, channels: int = 16) -> None:
        super().__init__(locals())
        self.extractor = nn.Sequential(
            nn.Conv2d(in_channels, channels, 5, padding="same"),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 5, padding="same"),
            nn.ReLU(),
        )
        self.classifier = nn.Conv2d(channels, num_classes, 1)
