"""Networks for small inputs."""

from __future__ import annotations

from torch import nn

from fedmoe_pl.models.experts.expert import Expert


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
