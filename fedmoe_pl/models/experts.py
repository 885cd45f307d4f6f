"""Experts of the papers, each split in an ``extractor`` and a ``classifier``.

The split is a convention, not a base class: any ``nn.Module`` is an expert, and one with these two attributes and
``forward(x) == classifier(extractor(x))`` can also be personalized by its classifier (PFL-FB) and give its features to
a gate (PFL-MFE). Constructor arguments are kept as attributes of the same name, so that a checkpoint can rebuild the
expert; ``input_shape`` lets a gate size itself.
"""

from __future__ import annotations

from torch import Tensor, nn

from fedmoe_pl.models.layers import FanOutConv2d


class LeNet5(nn.Module):
    """LeNet-5 with ReLU and max pooling (PFL-MoE; METHODS section 3): 61,706 parameters with one channel.

    Args:
        in_channels: channels of the input, shape (B, in_channels, 32, 32).
        num_classes: number of outputs.

    Example:
        >>> sum(p.numel() for p in LeNet5(in_channels=3).parameters())
        62006
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 10) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.input_shape = (in_channels, 32, 32)
        self.extractor = nn.Sequential(
            nn.Conv2d(in_channels, 6, 5),  # (B, 6, 28, 28)
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 16, 5),  # (B, 16, 10, 10)
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),  # (B, 400)
        )
        self.classifier = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes)."""
        return self.classifier(self.extractor(x))


class VGG16(nn.Module):
    """VGG-16 "D" without batch normalization for 32x32 images (PFL-MoE; METHODS section 3): 15,245,130 parameters.

    Convolution weights are drawn from N(0, sqrt(2 / (k * k * out_channels))), their biases are 0.

    Args:
        in_channels: channels of the input, shape (B, in_channels, 32, 32).
        num_classes: number of outputs.
        dropout: dropout probability in front of the first two linear layers.
    """

    _WIDTHS = (64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M")

    def __init__(self, in_channels: int = 3, num_classes: int = 10, dropout: float = 0.5) -> None:
        super().__init__()
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.dropout = dropout
        self.input_shape = (in_channels, 32, 32)
        layers: list[nn.Module] = []
        channels = in_channels
        for width in self._WIDTHS:
            if isinstance(width, str):
                layers.append(nn.MaxPool2d(2))
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

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes)."""
        return self.classifier(self.extractor(x))


class SmallMLP(nn.Module):
    """A perceptron with two hidden layers for small inputs such as the 8x8 digits.

    Args:
        in_features: number of input values per sample; inputs of shape (B, ...) are flattened.
        hidden_features: width of both hidden layers; the first one's output are the features.
        num_classes: number of outputs.
    """

    def __init__(self, in_features: int = 64, hidden_features: int = 64, num_classes: int = 10) -> None:
        super().__init__()
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.num_classes = num_classes
        self.input_shape = (in_features,)
        self.extractor = nn.Sequential(nn.Flatten(), nn.Linear(in_features, hidden_features), nn.ReLU())
        self.classifier = nn.Sequential(
            nn.Linear(hidden_features, hidden_features), nn.ReLU(), nn.Linear(hidden_features, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes)."""
        return self.classifier(self.extractor(x))


class RepresentationMLP(nn.Module):
    """A perceptron whose representation has a width of its own, as pFedMoE's experts have, for inputs such as digits.

    Args:
        in_features: number of input values per sample; inputs of shape (B, ...) are flattened.
        hidden_features: width of the hidden layer, in which architectures may differ.
        representation_features: width of the representation, the same for all experts of a mixture.
        num_classes: number of outputs.
    """

    def __init__(
        self,
        in_features: int = 64,
        hidden_features: int = 64,
        representation_features: int = 32,
        num_classes: int = 10,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.representation_features = representation_features
        self.num_classes = num_classes
        self.input_shape = (in_features,)
        self.extractor = nn.Sequential(
            nn.Flatten(),
            nn.Linear(in_features, hidden_features),
            nn.ReLU(),
            nn.Linear(hidden_features, representation_features),
            nn.ReLU(),
        )
        self.classifier = nn.Linear(representation_features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes)."""
        return self.classifier(self.extractor(x))
