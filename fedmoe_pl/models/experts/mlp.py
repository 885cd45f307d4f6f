"""Perceptrons for small inputs."""

from __future__ import annotations

from torch import Tensor, nn

from fedmoe_pl.checks import check_sizes


class SmallMLP(nn.Module):
    """A perceptron with two hidden layers for small inputs such as the 8x8 digits.

    Args:
        in_features: number of input values per sample; inputs of shape (B, ...) are flattened.
        hidden_features: width of both hidden layers; the first one's outputs are the features.
        num_classes: number of outputs.
    """

    def __init__(self, in_features: int = 64, hidden_features: int = 64, num_classes: int = 10) -> None:
        super().__init__()
        check_sizes(self, in_features=in_features, hidden_features=hidden_features, num_classes=num_classes)
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
        super().__init__()
        check_sizes(
            self,
            in_features=in_features,
            hidden_features=hidden_features,
            representation_features=representation_features,
            num_classes=num_classes,
        )
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.representation_features = representation_features
        self.num_classes = num_classes
        self.batch_norm = batch_norm
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

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes)."""
        return self.classifier(self.extractor(x))
