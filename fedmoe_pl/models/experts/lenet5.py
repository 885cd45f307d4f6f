"""LeNet-5, an expert of PFL-MoE."""

from __future__ import annotations

from torch import Tensor, nn

from fedmoe_pl.checks import check_sizes


class LeNet5(nn.Module):
    """LeNet-5 with ReLU and max pooling (PFL-MoE); 61,706 parameters with one input channel.

    Args:
        in_channels: channels of the input, shape (B, in_channels, 32, 32).
        num_classes: number of outputs.

    Example:
        >>> sum(p.numel() for p in LeNet5(in_channels=3).parameters())
        62006
    """

    def __init__(self, in_channels: int = 1, num_classes: int = 10) -> None:
        super().__init__()
        check_sizes(self, in_channels=in_channels, num_classes=num_classes)
        self.in_channels = in_channels
        self.num_classes = num_classes
        self.input_shape = (in_channels, 32, 32)
        self.extractor = nn.Sequential(
            nn.Conv2d(in_channels, 6, 5),  # (B, 6, 28, 28)
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Conv2d(6, 16, 5),  # (B, 16, 10, 10)
            nn.MaxPool2d(2),
            nn.ReLU(),
            nn.Flatten(),  # (B, 400)
        )
        self.classifier = nn.Sequential(
            nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, num_classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Logits of shape (B, num_classes)."""
        return self.classifier(self.extractor(x))
